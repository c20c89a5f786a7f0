"""The page, live or with a recorded trace in it: one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_SLOT = '<script id="trace" type="application/json">null</script>'


def live_page() -> str:
    """The page as the server sends it."""
    return files("outrider.viz").joinpath("page.html").read_text(encoding="utf-8")


def replay_page(rounds: Sequence[dict[str, Any]]) -> str:
    """The same page with a trace to replay, as ``read_trace`` returns it."""
    page, trace = live_page(), json.dumps(list(rounds), ensure_ascii=False).replace("<", "\\u003c")
    assert _SLOT in page, "the page has a place for a trace"
    return page.replace(_SLOT, _SLOT.replace("null", trace))
