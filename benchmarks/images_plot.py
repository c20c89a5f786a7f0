"""The plots of docs/images.md: quality against acceptance of every rule, from results files of benchmarks/images.py
and benchmarks/images_continuous_quality.py.

python benchmarks/images_plot.py benchmarks/results/images_digits.json --out docs/images/quality.svg
python benchmarks/images_plot.py benchmarks/results/images_cifar*.json --out docs/images/quality-cifar.svg
python benchmarks/images_plot.py benchmarks/results/images_continuous_quality.json --out docs/images/quality-continuous.svg
python benchmarks/images_plot.py benchmarks/results/images_digits.json --out build/quality.html     # a report: plot and table
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from outrider.bench.report_style import STYLE

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 330, 48, 40
_COLOURS = {"lossless": "#2a9d5c", "lantern": "#d65f2e", "lantern++": "#b8860b", "gsd": "#3b70c4", "gsd-partition": "#7a4fb0"}
_CONTINUOUS = {
    "plain": "#2a9d5c",
    "joint-path": "#3b70c4",
    "reflect": "#7a4fb0",
    "last-step": "#b8860b",
    "published": "#d65f2e",
    "draft alone": "#333333",
}
_OTHER = "#777777"
Row = Mapping[str, Any]


def rule_of(row: Row) -> str:
    """The rule's name in a row's label; of codes, or that it is lossless."""
    if "tokens_per_pass" in row:
        return str(row["method"]).split(",")[0]
    if row["lossless"]:
        return "lossless"
    return str(row["method"]).split(" + ")[1].split(" (")[0]


def _pace(row: Row) -> float:
    return float(row["tokens_per_pass"] if "tokens_per_pass" in row else row["codes_per_pass"])


def panel(rows: Sequence[Row], value: str, title: str, *, left: int) -> str:
    """A point per row: tokens per pass to the right, ``value`` upwards. Hollow points are variants of a rule."""
    rows = [{value: 0.0, **row} for row in rows]  # files of lossless rows have no loss
    top = 1.08 * max(float(row[value]) for row in rows) or 1.0
    most = 1.05 * max(map(_pace, rows))

    def x(number: float) -> float:
        return left + _LEFT + (_WIDTH - _LEFT - 16) * number / most

    def y(number: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 30) * number / top

    parts = [_text(left + _LEFT, 18, title, weight="bold"), *_axes(x, y, most, top, noun=_noun(rows))]
    for row in rows:
        place = f'cx="{x(_pace(row)):.1f}" cy="{y(row[value]):.1f}"'
        colour = (_COLOURS | _CONTINUOUS).get(rule_of(row), _OTHER)
        name = f"{row['method']}, window {row['window']}: {_pace(row):.2f} {_noun(rows)}, {value} {row[value]:.3f}"
        hollow = "random" in str(row["method"]) or ("tokens_per_pass" in row and "," in str(row["method"]))
        fill = f'fill="{"none" if hollow else colour}" stroke="{colour}" stroke-width="1.6"'
        parts.append(f'<circle {place} r="5" {fill}><title>{escape(name)}</title></circle>')
    return "".join(parts)


def _noun(rows: Sequence[Row]) -> str:
    return "tokens per pass" if "tokens_per_pass" in rows[0] else "codes per pass"


def _axes(x: Callable[[float], float], y: Callable[[float], float], most: float, top: float, *, noun: str) -> list[str]:
    parts = [f'<path d="M{x(0):.1f} {y(top):.1f}V{y(0):.1f}H{x(most):.1f}" fill="none" stroke="{_OTHER}"/>']
    parts += [_text(x(number), _HEIGHT - _BOTTOM + 16, str(number), anchor="middle") for number in range(int(most) + 1)]
    step = 10 ** (len(str(int(top))) - 1) if top >= 1 else 0.05
    step = step / 2 if top / step < 3 else step
    marks = [index * step for index in range(int(top / step) + 1)]
    parts += [_text(x(0) - 6, y(mark) + 4, f"{mark:g}", anchor="end") for mark in marks]
    return [*parts, _text((x(0) + x(most)) / 2, _HEIGHT - 6, noun, anchor="middle")]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{_OTHER}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


def plot(rows: Sequence[Row]) -> str:
    """Two panels, loss and CNN-FID, and a legend; the rows are all of codes, or all of continuous tokens."""
    continuous = "tokens_per_pass" in rows[0]
    named = list(_CONTINUOUS.items()) if continuous else [*_COLOURS.items(), ("lenient", _OTHER)]
    legend = "".join(
        f'<circle cx="{60 + 150 * index}" cy="{_HEIGHT + 14}" r="5" fill="{colour}"/>'
        + _text(70 + 150 * index, _HEIGHT + 18, name)
        for index, (name, colour) in enumerate(named)
    )
    if continuous:
        judged, loss, title = [row for row in rows if row["ks_mean"] != ""], "ks_mean", "KS distance of a token's law, mean"
    else:
        judged = [row for row in rows if row["lossless"] or row["tv_mean"] > 0]
        loss, title = "tv_mean", "one-step total variation, mean"
    panels = panel(judged, loss, title, left=0) + panel(rows, "cnn_fid", "CNN-FID", left=_WIDTH)
    size = f'viewBox="0 0 {2 * _WIDTH} {_HEIGHT + 30}" width="{2 * _WIDTH}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{panels}{legend}</svg>\n'


def report(documents: Sequence[Mapping[str, Any]]) -> str:
    """One page that needs nothing else: every file's plot, its table, and how it was made."""
    title = "Outrider: quality against acceptance of images"
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    head += f"<title>{title}</title><style>{STYLE} svg{{max-width:100%;height:auto}}</style>"
    body = "".join(_section(document) for document in documents)
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{title}</h1>{body}</body></html>\n"


def _section(document: Mapping[str, Any]) -> str:
    rows: Sequence[Row] = document["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_cell(row.get(name, "")) for name in names] for row in rows]
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    heads = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    how = escape(f"{document['command']}; {document['machine']}; {document['date']}; commit {document['commit']}")
    table = f"<div class='wide'><table><tr>{heads}</tr>{cells}</table></div>"
    return f"<h2>{escape(document['what'])}</h2>{plot(rows)}{table}<p class='note'>{how}</p>"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="files that benchmarks/images.py --out wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/images/quality.svg"), help="a plot (.svg) or a report (.html)")
    arguments = parser.parse_args()
    documents = [json.loads(file.read_text()) for file in arguments.files]
    rows = [row for document in documents for row in document["rows"]]
    arguments.out.write_text(report(documents) if arguments.out.suffix == ".html" else plot(rows))
    print(arguments.out)


if __name__ == "__main__":
    main()
