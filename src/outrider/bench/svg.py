"""Small plots as SVG text: horizontal bars with intervals, and lines. They need no script, font or other file.

Colours are classes of the page's style sheet (``report_style``), so that a plot is readable on light and on dark ground.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

NUM_COLOURS = 8
"""Number of series with colours of their own."""
_WIDTH = 900
_CLOSEST = 24
"""Fewest pixels between two labels of an axis."""
Place = Callable[[float], float]
"""Converts a value to a place on an axis, in pixels."""


@dataclass(frozen=True)
class Bar:
    """A value with its interval."""

    label: str
    value: float
    low: float
    high: float
    tone: str = ""
    """Class of the bar, if it does not follow from the comparison with the mark."""


def bars(items: Sequence[Bar], *, unit: str = "x", digits: int = 2, mark: float | None = 1.0) -> str:
    """One bar per item. Everything is compared with the value ``mark``. Intervals far beyond all values are cut off."""
    left, row = _room_for(item.label for item in items), 22
    most = max([item.value for item in items] + [mark or 0.0]) or 1.0
    top = max(most, min(max(item.high for item in items), 1.6 * most))
    height = row * len(items) + 12

    def x(value: float) -> float:
        return left + (_WIDTH - left - 80) * max(0.0, min(value, top)) / top

    parts = [_open(height)]
    for number, item in enumerate(items):
        y = 6 + number * row
        parts.append(_text(left - 8, y + 13, item.label, anchor="end"))
        size = f'width="{x(item.value) - left:.1f}" height="{row - 6}"'
        parts.append(f'<rect x="{left}" y="{y}" {size} rx="2" class="{item.tone or _tone(item, mark)}"/>')
        parts.append(_line(x(item.low), y + 8, x(item.high), y + 8, "whisker"))
        parts.append(_text(x(max(item.high, item.value)) + 7, y + 13, f"{item.value:,.{digits}f}{unit}"))
    if mark is not None:
        parts.append(_line(x(mark), 0, x(mark), height, "mark"))
    return "".join([*parts, "</svg>"])


def _tone(item: Bar, mark: float | None) -> str:
    if mark is None or item.low >= mark:
        return "up"
    return "open" if item.high >= mark else "down"


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x_title: str, y_title: str, log_x: bool = False, height: int = 330
) -> str:
    """One line with dots per series of (x, y) points, at most ``NUM_COLOURS`` of them."""
    points = [point for values in series.values() for point in values]
    if not points:
        return ""
    left, right, bottom, above = 64, 24 + _room_for(series), 44, 30
    low_x, high_x = min(p[0] for p in points), max(p[0] for p in points)
    steps = nice_steps(max(p[1] for p in points))

    def x(value: float) -> float:
        begin, end, at = (math.log(max(v, 1e-9)) if log_x else v for v in (low_x, high_x, value))
        return left + (_WIDTH - left - right) * ((at - begin) / (end - begin) if end > begin else 0.5)

    def y(value: float) -> float:
        return above + (height - bottom - above) * (1 - value / steps[-1])

    parts = [_open(height), _axes(sorted({p[0] for p in points}), steps, x=x, y=y)]
    for number, (name, values) in enumerate(series.items()):
        colour = f"c{number % NUM_COLOURS}"
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in values)
        parts.append(f'<g class="{colour}"><title>{escape(name)}</title><polyline points="{path}"/>')
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in values]
        parts.append(f'<circle cx="{_WIDTH - right + 20}" cy="{above + 4 + 19 * number}" r="5"/></g>')
        parts.append(_text(_WIDTH - right + 31, above + 8 + 19 * number, name))
    parts.append(_text((left + _WIDTH - right) / 2, height - 6, x_title, anchor="middle", tone="quiet"))
    parts.append(_text(8, 14, y_title, tone="quiet"))
    return "".join([*parts, "</svg>"])


def nice_steps(most: float) -> list[float]:
    """0, and four to six round numbers up to at least ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(most / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10, 20) if most / (unit * factor) <= 5)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _room_for(labels: Iterable[str]) -> int:
    """Pixels of the longest label."""
    return min(340, 20 + 7 * max((len(label) for label in labels), default=10))


def _axes(ticks: Sequence[float], steps: Sequence[float], *, x: Place, y: Place) -> str:
    parts: list[str] = []
    for value in steps:
        parts.append(_line(x(ticks[0]), y(value), x(ticks[-1]), y(value), "grid" if value else "axis"))
        parts.append(_text(56, y(value) + 4, f"{value:,.6g}", anchor="end", tone="quiet"))
    last = -math.inf
    for tick in ticks:
        if x(tick) - last >= _CLOSEST:
            parts.append(_text(x(tick), y(0) + 17, f"{tick:g}", anchor="middle", tone="quiet"))
            last = x(tick)
    return "".join(parts)


def _open(height: int) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'


def _text(x: float, y: float, text: str, *, anchor: str = "start", tone: str = "ink") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{tone}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, tone: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{tone}"/>'
