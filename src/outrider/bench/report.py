"""The HTML report of a bench: one file, readable without a network, drawn from the JSON and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from outrider.bench.curves import PassCurve
from outrider.bench.peers.race import OURS
from outrider.bench.report_style import STYLE
from outrider.bench.settings import BASELINE
from outrider.bench.summary import Line
from outrider.bench.svg import NUM_COLOURS, Bar, bars, lines
from outrider.bench.table import costs, interval

_SHOWN = NUM_COLOURS
"""Number of settings in a line plot; the tables hold all."""


def report(document: Mapping[str, Any]) -> str:
    """The whole page."""
    found = [Line.from_json(line) for line in document["lines"]]
    sections = [
        _summary(document, found),
        _speed_ups(found),
        _acceptance(found),
        _costs(document),
        _batches(found),
        _peers(document),
        _tables(found),
        _not_measured(document),
        _origin(document),
    ]
    title = f"Outrider bench: {document['model']['name']}"
    body = "\n".join(section for section in sections if section)
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
    head += f"<style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n"


def _summary(document: Mapping[str, Any], found: Sequence[Line]) -> str:
    overall = next(iter(_groups(found).values()))
    best, plain = max(overall, key=lambda line: line.speedup.value), overall[0]
    tiles = [
        (best.label, f"fastest over {plain.suite}"),
        (f"{best.speedup.value:.2f}x", f"plain decoding (95 %: {interval(best.speedup)})"),
        (f"{best.speed.value:,.0f}", f"tokens/s; plain decoding {plain.speed.value:,.0f}"),
        (f"{best.tokens_per_pass:.2f}", "tokens per target pass"),
        (f"{plain.bandwidth_fraction:.0%}", "of read bandwidth (plain)"),
    ]
    said = "" if best.label != BASELINE else "<p>Speculation does not pay here: plain decoding is the fastest.</p>"
    model, run, origin = document["model"], document["run"], document["provenance"]
    threads = f"{origin['threads']} thread{'s' if origin['threads'] != 1 else ''}"
    how = (
        f"{model['dtype']} on {origin['cpu'] if model['device'] == 'cpu' else origin['gpu']}, {threads}, "
        f"{origin['date'][:10]}; {document['rounds']} interleaved rounds, up to {run['max_tokens']} tokens, "
        f"temperature {run['temperature']:g}. Speeds exclude the prefill; intervals are 95 %."
    )
    shown = "".join(f"<div class='tile'><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in tiles)
    return f"<p class='note'>{escape(how)}</p><div class='tiles'>{shown}</div>{said}"


def _groups(found: Sequence[Line]) -> dict[tuple[int, str], list[Line]]:
    groups: dict[tuple[int, str], list[Line]] = {}
    for line in found:
        groups.setdefault((line.batch_size, line.suite), []).append(line)
    return groups


def _speed_ups(found: Sequence[Line]) -> str:
    """Bars over all measurements, then every method on every suite, for each batch size."""
    first = _fastest_first(next(iter(_groups(found).values())))[1:]
    if not first:
        return ""
    note = "Blue: faster than plain decoding. Grey: the interval (thin line) includes 1. Red: slower."
    plot = bars([Bar(_name(line), line.speedup.value, line.speedup.low, line.speedup.high) for line in first])
    parts = [f"<h2>Speed-up over plain decoding</h2><p class='note'>{note}</p>{plot}<h3>By suite</h3>"]
    for number, size in enumerate(dict.fromkeys(line.batch_size for line in found)):
        heat = _suite_heat([line for line in found if line.batch_size == size])
        title = f"batch {size}"
        parts.append(heat if number == 0 else f"<details><summary>{title}</summary>{heat}</details>")
    return "".join(parts)


def _suite_heat(found: Sequence[Line]) -> str:
    """A table of colours: settings down, suites across."""
    suites = list(dict.fromkeys(line.suite for line in found))
    by_place = {(line.label, line.suite): line for line in found}
    order = _fastest_first([line for line in found if line.suite == suites[0]])[1:]
    rows: list[list[str]] = []
    for line in order:
        values = [by_place[line.label, suite].speedup.value for suite in suites]
        shades = [min(72, 100 * abs(math.log2(max(value, 1e-3)))) for value in values]
        tones = zip(values, shades, strict=True)
        rows.append([_cell(_name(line)), *(_cell(f"{v:.2f}", "up" if v >= 1 else "down", shade) for v, shade in tones)])
    return _rows_table(["", *suites], rows, kind="heat")


def _fastest_first(members: Sequence[Line]) -> list[Line]:
    """Lines in order: plain decoding, then the others by speed."""
    return [members[0], *sorted(members[1:], key=lambda line: -line.speedup.value)]


def _name(line: Line) -> str:
    return line.label if line.lossless else f"{line.label} (lossy)"


def _acceptance(found: Sequence[Line]) -> str:
    """Acceptance by depth: the best settings as lines, all of them as a table."""
    first = next(iter(_groups(found).values()))
    drafting = sorted((line for line in first if line.by_depth), key=lambda line: -line.tokens_per_pass)
    if not drafting:
        return ""
    series = {line.label: [(k + 1, rate) for k, rate in enumerate(line.by_depth[:12])] for line in drafting[:_SHOWN]}
    plot = lines(series, x_title="position of the guess", y_title="accepted / tested")
    depth = max(len(line.by_depth[:12]) for line in drafting)
    rows = [
        [_cell(_name(line)), _cell(f"{line.tokens_per_pass:.2f}")]
        + [_cell(f"{100 * rate:.0f}", "up", 60 * rate) for rate in line.by_depth[:12]]
        for line in drafting
    ]
    heat = _rows_table(["%", "tokens/pass", *map(str, range(1, depth + 1))], rows, kind="heat")
    note = f"The {len(series)} settings with the most tokens per pass."
    return (
        f"<h2>Acceptance per position ({escape(first[0].suite)})</h2><p class='note'>{note}</p>{plot}"
        f"<details><summary>all settings</summary>{heat}</details>"
    )


def _costs(document: Mapping[str, Any]) -> str:
    curves = [PassCurve.from_json(data) for data in document.get("curves", ())]
    if not curves:
        return ""
    series = {
        f"context {curve.context}" + (f", batch {curve.batch_size}" if curve.batch_size > 1 else ""): [
            (nodes, 1000 * seconds) for nodes, seconds in zip(curve.nodes, curve.seconds, strict=True)
        ]
        for curve in curves
    }
    plot = lines(series, x_title="nodes per row in one target pass", y_title="ms", log_x=True)
    return f"<h2>Cost against tree size</h2>{plot}"


def _batches(found: Sequence[Line]) -> str:
    sizes = sorted({line.batch_size for line in found})
    if len(sizes) < 2:
        return "<h2>Speed against batch</h2><p class='note'>One batch size was measured; --batch-sizes 1,4,16 draws this.</p>"
    first = [line for line in found if line.suite == found[0].suite]
    plain, *others = [line for line in first if line.batch_size == sizes[-1]]
    best = sorted(others, key=lambda line: -line.speed.value)[: _SHOWN - 1]
    series = {
        top.label: [(line.batch_size, line.speed.value) for line in first if line.label == top.label] for top in [plain, *best]
    }
    plot = lines(series, x_title="requests in a batch", y_title="tokens/s of the whole batch", log_x=True)
    note = f"Plain decoding and the {len(best)} fastest at batch {sizes[-1]}."
    return f"<h2>Speed against batch</h2><p class='note'>{note}</p>{plot}"


def _peers(document: Mapping[str, Any]) -> str:
    peers = document.get("peers")
    if not peers:
        return ""
    ranked = sorted(peers["lines"], key=lambda entry: -entry["speed"]["value"])
    rows = [_peer_cells(entry) for entry in ranked]
    items = [
        Bar(entry["name"], *(entry["speed"][key] for key in ("value", "low", "high")), tone=_side(entry)) for entry in ranked
    ]
    head = ["engine", "tokens/s", "95 %", "to its own plain", "to our plain", "to our best", "our text"]
    absent = "".join(f"<li>{escape(skip['name'])}: {escape(skip['reason'])}</li>" for skip in peers["skipped"])
    verdict = "".join(f"<li>{escape(text)}</li>" for text in peers["verdict"])
    absent = f"<p>Not measured:</p><ul>{absent}</ul>" if absent else ""
    plot = bars(items, unit=" tokens/s", digits=0, mark=None)
    return f"<h2>Other engines</h2>{plot}<ul>{verdict}</ul>{_html_table(head, rows)}{absent}"


def _side(entry: Mapping[str, Any]) -> str:
    """The bar's class: our own engine is coloured."""
    return "up" if entry["name"].startswith(OURS) else "open"


def _peer_cells(entry: Mapping[str, Any]) -> list[str]:
    speed, ratios = entry["speed"], ("to_own_plain", "to_our_plain", "to_our_best")
    shown = [f"{speed['value']:.1f}", f"{speed['low']:.1f} - {speed['high']:.1f}", *(f"{entry[name]:.2f}x" for name in ratios)]
    return [entry["name"], *shown, f"{entry['identical']:.0%}"]


def _tables(found: Sequence[Line]) -> str:
    head = [
        "",
        "tokens/s",
        "95 %",
        "to plain",
        "95 %",
        "tokens/pass",
        "acceptance",
        "wasted",
        "draft",
        "verify",
        "walk",
        "host",
    ]
    head += ["bandwidth", "memory added", "same text"]
    parts = ["<h2>All figures</h2>"]
    for number, ((size, suite), members) in enumerate(_groups(found).items()):
        rows = [_cells(line) for line in _fastest_first(members)]
        title = f"{suite}, batch {size}" if size > 1 else suite
        opened = " open" if number == 0 else ""
        parts.append(f"<details{opened}><summary>{escape(title)}</summary>{_html_table(head, rows)}</details>")
    return "".join(parts)


def _cells(line: Line) -> list[str]:
    return [
        _name(line),
        f"{line.speed.value:.1f}",
        interval(line.speed, 1),
        f"{line.speedup.value:.2f}x",
        interval(line.speedup),
        *costs(line),
        f"{line.identical:.0%}",
    ]


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return _rows_table(head, [[_cell(text) for text in row] for row in rows])


def _rows_table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table whose cells are already HTML."""
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<div class='wide'><table class='{kind}'><tr>{top}</tr>{body}</table></div>"


def _cell(text: str, tone: str = "", shade: float = 0.0) -> str:
    style = f" class='{tone}' style='--v:{shade:.0f}'" if tone else ""
    return f"<td{style}>{escape(text)}</td>"


def _not_measured(document: Mapping[str, Any]) -> str:
    items = "".join(f"<li>{escape(skip['label'])}: {escape(skip['reason'])}</li>" for skip in document["skipped"])
    return f"<h2>Not measured</h2><ul>{items}</ul>" if items else ""


def _origin(document: Mapping[str, Any]) -> str:
    shown = {
        name: document[name] for name in ("provenance", "model", "drafts", "run", "bandwidth", "suites") if name in document
    }
    text = escape(json.dumps(shown, indent=2, ensure_ascii=False))
    return f"<h2>Provenance</h2><details><summary>machine, versions, models, run</summary><pre>{text}</pre></details>"
