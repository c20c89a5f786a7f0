"""Small plots as SVG text: horizontal bars with intervals, and lines. No script, no fonts or files from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

PALETTE = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d", "#285e61", "#4a5568", "#c53030", "#3182ce")
_WIDTH = 760
Place = Callable[[float], float]
"""A value's place on an axis, in pixels."""


@dataclass(frozen=True)
class Bar:
    """A value with its interval."""

    label: str
    value: float
    low: float
    high: float
    note: str = ""


def bars(items: Sequence[Bar], *, unit: str = "x", mark: float | None = 1.0) -> str:
    """One bar per item; ``mark`` is the value everything is compared with."""
    left, row = _room_for(item.label for item in items), 24
    top = max([item.high for item in items] + [mark or 0.0]) * 1.12 or 1.0
    height = row * len(items) + 30

    def x(value: float) -> float:
        return left + (_WIDTH - left - 90) * max(0.0, min(value, top)) / top

    parts = [_open(height)]
    for number, item in enumerate(items):
        y = 8 + number * row
        colour = PALETTE[0] if mark is None or item.low >= mark else "#a0aec0" if item.high >= mark else PALETTE[8]
        parts.append(_text(left - 8, y + 13, item.label, anchor="end"))
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{x(item.value) - left:.1f}" height="{row - 9}" fill="{colour}"/>')
        parts.append(_line(x(item.low), y + 9, x(item.high), y + 9, "#1a202c", 1.5))
        parts.append(_text(x(max(item.high, item.value)) + 6, y + 13, f"{item.value:.2f}{unit} {item.note}".strip()))
    if mark is not None:
        parts.append(_line(x(mark), 0, x(mark), height - 24, "#718096", 1, dash=True))
    return "".join([*parts, "</svg>"])


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x_title: str, y_title: str, log_x: bool = False, height: int = 300
) -> str:
    """One line with dots per series of (x, y) points."""
    points = [point for values in series.values() for point in values]
    if not points:
        return ""
    left, right, bottom = 60, 20 + _room_for(series), 40
    low_x, high_x = min(p[0] for p in points), max(p[0] for p in points)
    top = max(p[1] for p in points) * 1.1 or 1.0

    def x(value: float) -> float:
        begin, end, at = (math.log(max(v, 1e-9)) if log_x else v for v in (low_x, high_x, value))
        return left + (_WIDTH - left - right) * ((at - begin) / (end - begin) if end > begin else 0.5)

    def y(value: float) -> float:
        return 10 + (height - bottom - 10) * (1 - value / top)

    parts = [_open(height), _axes(sorted({p[0] for p in points}), top, x=x, y=y, height=height - bottom)]
    for number, (name, values) in enumerate(series.items()):
        colour = PALETTE[number % len(PALETTE)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in values)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6" fill="{colour}"/>' for a, b in values]
        parts.append(f'<rect x="{_WIDTH - right + 12}" y="{12 + 17 * number}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(_WIDTH - right + 27, 21 + 17 * number, name))
    parts.append(_text((left + _WIDTH - right) / 2, height - 6, x_title, anchor="middle"))
    parts.append(_text(left, 8, y_title, anchor="middle"))
    return "".join([*parts, "</svg>"])


def _room_for(labels: Iterable[str]) -> int:
    """Pixels that the longest label takes."""
    return min(320, 20 + 7 * max((len(label) for label in labels), default=10))


def _axes(ticks: Sequence[float], top: float, *, x: Place, y: Place, height: int) -> str:
    shown = ticks if len(ticks) <= 16 else ticks[:: math.ceil(len(ticks) / 16)]
    parts = [_line(x(ticks[0]), height, x(ticks[-1]), height, "#4a5568", 1)]
    parts += [_text(x(tick), height + 15, f"{tick:g}", anchor="middle") for tick in shown]
    for step in range(5):
        value = top * step / 4
        parts.append(_line(x(ticks[0]), y(value), x(ticks[-1]), y(value), "#e2e8f0", 1))
        parts.append(_text(52, y(value) + 4, f"{value:.3g}", anchor="end"))
    return "".join(parts)


def _open(height: int) -> str:
    style = "font-family:system-ui,sans-serif;font-size:12px;max-width:100%"
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#1a202c">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, *, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{dashes}/>'
