"""The page, live or with a recorded trace in it: one file that needs nothing else, put together from ``site/``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_SLOT = '<script id="trace" type="application/json">null</script>'
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


def live_page() -> str:
    """The page as the server sends it: its style and scripts are written into it."""
    page = _STYLE.sub(lambda found: f"<style>\n{_part(found[1])}</style>", _part("page.html"))
    return _SCRIPT.sub(lambda found: f"<script>\n{_part(found[1])}</script>", page)


def replay_page(rounds: Sequence[dict[str, Any]]) -> str:
    """The same page with a trace to replay, as ``read_trace`` returns it."""
    page, trace = live_page(), json.dumps(list(rounds), ensure_ascii=False).replace("<", "\\u003c")
    assert _SLOT in page, "the page has a place for a trace"
    return page.replace(_SLOT, _SLOT.replace("null", trace))


def _part(name: str) -> str:
    return files("outrider.viz").joinpath("site", name).read_text(encoding="utf-8")
