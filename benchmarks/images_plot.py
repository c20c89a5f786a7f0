"""The plots of docs/images.md: quality against acceptance of every rule, from results files of benchmarks/images.py.

python benchmarks/images_plot.py benchmarks/results/images_digits.json --out docs/images/quality.svg
python benchmarks/images_plot.py benchmarks/results/images_cifar.json benchmarks/results/images_cifar_relaxed.json \
    --out docs/images/quality-cifar.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 330, 48, 40
_COLOURS = {"lossless": "#2a9d5c", "lantern": "#d65f2e", "lantern++": "#b8860b", "gsd": "#3b70c4", "gsd-partition": "#7a4fb0"}
_OTHER = "#777777"
Row = Mapping[str, Any]


def rule_of(row: Row) -> str:
    """The rule's name in a row's label, or that it is lossless."""
    if row["lossless"]:
        return "lossless"
    return str(row["method"]).split(" + ")[1].split(" (")[0]


def panel(rows: Sequence[Row], value: str, title: str, *, left: int) -> str:
    """A point per row: codes per pass to the right, ``value`` upwards."""
    rows = [{value: 0.0, **row} for row in rows]  # files of lossless rows have no loss
    top = 1.08 * max(float(row[value]) for row in rows) or 1.0
    most = 1.05 * max(float(row["codes_per_pass"]) for row in rows)

    def x(number: float) -> float:
        return left + _LEFT + (_WIDTH - _LEFT - 16) * number / most

    def y(number: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 30) * number / top

    parts = [_text(left + _LEFT, 18, title, weight="bold"), *_axes(x, y, most, top)]
    for row in rows:
        place = f'cx="{x(row["codes_per_pass"]):.1f}" cy="{y(row[value]):.1f}"'
        colour = _COLOURS.get(rule_of(row), _OTHER)
        name = f"{row['method']}, window {row['window']}: {row['codes_per_pass']:.2f} codes per pass, {value} {row[value]:.3f}"
        hollow = "random" in str(row["method"])
        fill = f'fill="{"none" if hollow else colour}" stroke="{colour}" stroke-width="1.6"'
        parts.append(f'<circle {place} r="5" {fill}><title>{name}</title></circle>')
    return "".join(parts)


def _axes(x: Callable[[float], float], y: Callable[[float], float], most: float, top: float) -> list[str]:
    parts = [f'<path d="M{x(0):.1f} {y(top):.1f}V{y(0):.1f}H{x(most):.1f}" fill="none" stroke="{_OTHER}"/>']
    parts += [_text(x(number), _HEIGHT - _BOTTOM + 16, str(number), anchor="middle") for number in range(int(most) + 1)]
    step = 10 ** (len(str(int(top))) - 1) if top >= 1 else 0.05
    step = step / 2 if top / step < 3 else step
    marks = [index * step for index in range(int(top / step) + 1)]
    parts += [_text(x(0) - 6, y(mark) + 4, f"{mark:g}", anchor="end") for mark in marks]
    return [*parts, _text((x(0) + x(most)) / 2, _HEIGHT - 6, "codes per pass", anchor="middle")]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{_OTHER}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


def plot(rows: Sequence[Row]) -> str:
    """Two panels, loss and CNN-FID, and a legend."""
    legend = "".join(
        f'<circle cx="{60 + 150 * index}" cy="{_HEIGHT + 14}" r="5" fill="{colour}"/>'
        + _text(70 + 150 * index, _HEIGHT + 18, name)
        for index, (name, colour) in enumerate([*_COLOURS.items(), ("lenient", _OTHER)])
    )
    judged = [row for row in rows if row["lossless"] or row["tv_mean"] > 0]
    panels = panel(judged, "tv_mean", "one-step total variation, mean", left=0) + panel(rows, "cnn_fid", "CNN-FID", left=_WIDTH)
    size = f'viewBox="0 0 {2 * _WIDTH} {_HEIGHT + 30}" width="{2 * _WIDTH}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{panels}{legend}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="files that benchmarks/images.py --out wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/images/quality.svg"))
    arguments = parser.parse_args()
    rows = [row for file in arguments.files for row in json.loads(file.read_text())["rows"]]
    arguments.out.write_text(plot(rows))
    print(arguments.out)


if __name__ == "__main__":
    main()
