"""The metrics of all replicas as one page: the same families, every sample with the name of its replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.metrics import StoredSizes

_OF_THE_FRONT = ("outrider:requests", "outrider:stored_responses", "outrider:stored_response_bytes")
"""Counted at the front door, however many replicas were asked."""


@final
class FrontMetrics:
    """The front door's own counters."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("outrider:requests", "Requests by status", ("status",), registry=registry)
        self.lost = Counter("outrider:fleet_replica_lost", "Requests whose replica ended before the answer", registry=registry)
        self.repeated = Counter("outrider:fleet_repeated", "Of those, the ones another replica was asked", registry=registry)
        self.swaps = Counter("outrider:fleet_draft_swaps", "Times the drafts of all replicas were replaced", registry=registry)
        self.replicas = Gauge("outrider:fleet_replicas", "Replicas that answer", registry=registry)
        self.stored = StoredSizes(registry)


@final
class Merged:
    """A collector of the front door's metrics and of those the replicas sent."""

    def __init__(self, front: FrontMetrics, told: Mapping[str, bytes]) -> None:
        self._front, self._told = front, told

    def text(self) -> bytes:
        """The metrics in Prometheus' exposition format."""
        return generate_latest(self)  # pyright: ignore[reportArgumentType]

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._front.registry.collect()}
        for replica, text in sorted(self._told.items()):
            for family in text_string_to_metric_families(text.decode()):
                if family.name not in _OF_THE_FRONT:
                    self._add(families, family, replica)
        return iter(families.values())

    def _add(self, families: dict[str, Metric], family: Metric, replica: str) -> None:
        total = families.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
        total.samples += [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]
