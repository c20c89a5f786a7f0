"""A plot of acceptance by position, saved with every checkpoint: a line for each evaluation, the latest one darkest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.models.checkpoint import replace_file

_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 240, 44, 30


def acceptance_plot(path: Path, title: str, history: Sequence[dict[str, Any]]) -> None:
    """SVG lines of acceptance given that all earlier guesses were accepted, by depth, below a title and the step."""
    shown = list(history)[-8:]
    lines = [_line(entry["by_depth"], (index + 1) / len(shown)) for index, entry in enumerate(shown)]
    grid = "".join(_grid(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    last = shown[-1]
    ticks = "".join(_tick(k, len(last["by_depth"])) for k in range(len(last["by_depth"])))
    head = f"{title}, step {last['step']}"
    body = f'<text x="{_LEFT}" y="18" font-size="11">{head}</text>{grid}{"".join(lines)}{ticks}'
    size = f'width="{_WIDTH + _LEFT + 20}" height="{_HEIGHT + _TOP + 30}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" {size}>{body}</svg>\n'
    replace_file(path, lambda beside: beside.write_text(svg))


def _x(place: int, count: int) -> float:
    return _LEFT + _WIDTH * (place + 0.5) / count


def _tick(place: int, count: int) -> str:
    where = f'x="{_x(place, count):.0f}" y="{_HEIGHT + _TOP + 16}"'
    return f'<text {where} font-size="11" text-anchor="middle">{place + 1}</text>'


def _line(shares: Sequence[float], strength: float) -> str:
    points = " ".join(f"{_x(k, len(shares)):.1f},{_TOP + _HEIGHT * (1 - share):.1f}" for k, share in enumerate(shares))
    return f'<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-opacity="{strength:.2f}" stroke-width="2"/>'


def _grid(share: float) -> str:
    y = _TOP + _HEIGHT * (1 - share)
    return (
        f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" font-size="11" text-anchor="end">{share:.2f}</text>'
    )
