"""The live page, the page with a recorded trace, and the page of images. Each is a single file without dependencies, made from
``site/``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


def live_page() -> str:
    """The page as the server sends it, with style and scripts included."""
    return _whole("page.html")


def replay_page(rounds: Sequence[dict[str, Any]]) -> str:
    """The same page with a trace to replay, as ``read_trace`` returns it."""
    return _filled(live_page(), "trace", list(rounds))


def image_page(title: str, images: Sequence[dict[str, Any]]) -> str:
    """A page on which images grow, pass by pass. Of each: ``image`` (a data URL), ``grid`` (codes of a row), and ``rounds`` and
    ``origins`` of its codes."""
    return _filled(_whole("image.html"), "drawn", {"title": title, "images": list(images)})


def _whole(name: str) -> str:
    page = _STYLE.sub(lambda found: f"<style>\n{_part(found[1])}</style>", _part(name))
    return _SCRIPT.sub(lambda found: f"<script>\n{_part(found[1])}</script>", page)


def _filled(page: str, name: str, data: Any) -> str:
    """A page with data in its placeholder."""
    begin, end = f'<script id="{name}" type="application/json">', "</script>"
    assert f"{begin}null{end}" in page, "the page has a place for its data"
    return page.replace(f"{begin}null{end}", begin + json.dumps(data, ensure_ascii=False).replace("<", "\\u003c") + end)


def _part(name: str) -> str:
    return files("outrider.viz").joinpath("site", name).read_text(encoding="utf-8")
