"""The page of the server's metrics, ``docs/metrics.md``: every family of ``/metrics``. ``reference.py`` writes it."""

from __future__ import annotations

from prometheus_client.metrics import MetricWrapperBase

from outrider.server.metrics import Metrics

_INTRODUCTION = """# Metrics

This page is written by `python scripts/reference.py` from the registry of the server. `GET /metrics` has these names in
the format of Prometheus. Counters end in `_total` there; a histogram has `_bucket`, `_sum` and `_count`. The server
counts on when its engine is started anew.

Names of guesses are vLLM's behind the prefix. [Serve](serving.md) says how to read them, and `deploy/` holds a
dashboard.
"""


def page() -> str:
    """The whole page."""
    families = {id(one): one for one in Metrics().registry._names_to_collectors.values()}
    rows = []
    for family in families.values():
        assert isinstance(family, MetricWrapperBase)
        labels = ", ".join(f"`{label}`" for label in family._labelnames)
        rows.append(f"| `{family._name}` | {family._type} | {labels} | {family._documentation} |")
    return "\n".join([_INTRODUCTION, "| name | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"
