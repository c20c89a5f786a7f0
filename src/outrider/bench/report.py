"""The HTML report of a bench: one file, readable without a network, drawn from the JSON and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from outrider.bench.curves import Curve
from outrider.bench.settings import BASELINE
from outrider.bench.summary import Line
from outrider.bench.svg import Bar, bars, lines
from outrider.bench.table import interval, size_text

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1a202c}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem;border-bottom:1px solid #e2e8f0}h3{font-size:1rem}
table{border-collapse:collapse;font-size:13px;margin:.5rem 0 1.2rem}th,td{padding:.22rem .55rem;text-align:right}
th{background:#f7fafc}td:first-child,th:first-child{text-align:left}tr:nth-child(even) td{background:#fbfdff}
.good{color:#276749;font-weight:600}.bad{color:#c53030}.note{color:#4a5568;font-size:13px}
details{margin:.6rem 0}pre{font-size:12px;overflow:auto;background:#f7fafc;padding:.6rem}
"""


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
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n"


def _summary(document: Mapping[str, Any], found: Sequence[Line]) -> str:
    first = found[0]
    overall = [line for line in found if (line.suite, line.batch_size) == (first.suite, first.batch_size)]
    best = max(overall, key=lambda line: line.speedup.value)
    said = (
        f"Fastest over {escape(first.suite)}: <b>{escape(best.label)}</b>, {best.speed.value:.1f} tokens/s, "
        f"<b>{best.speedup.value:.2f}x</b> plain decoding (95 %: {interval(best.speedup)}), {best.tokens_per_pass:.2f} tokens "
        f"per target pass. Plain decoding: {overall[0].speed.value:.1f} tokens/s, "
        f"{overall[0].bandwidth_fraction:.0%} of this machine's read bandwidth."
    )
    if best.label == BASELINE:
        said = f"Speculation does not pay here: plain decoding, {best.speed.value:.1f} tokens/s, is the fastest."
    model, run = document["model"], document["run"]
    origin = document["provenance"]
    how = (
        f"{model['dtype']} on {origin['cpu'] if model['device'] == 'cpu' else origin['gpu']}, {origin['threads']} threads, "
        f"{document['rounds']} interleaved rounds, up to {run['max_tokens']} tokens, temperature {run['temperature']:g}."
    )
    return f"<p>{said}</p><p class='note'>{escape(how)} Speeds exclude the prefill; intervals are 95 %.</p>"


def _groups(found: Sequence[Line]) -> dict[tuple[int, str], list[Line]]:
    groups: dict[tuple[int, str], list[Line]] = {}
    for line in found:
        groups.setdefault((line.batch_size, line.suite), []).append(line)
    return groups


def _speed_ups(found: Sequence[Line]) -> str:
    parts = ["<h2>Speed-up over plain decoding</h2><p class='note'>Grey: the interval includes 1. Red: slower.</p>"]
    for number, ((size, suite), members) in enumerate(_groups(found).items()):
        ordered = sorted(members[1:], key=lambda line: -line.speedup.value)
        if not ordered:
            continue
        items = [Bar(line.label, line.speedup.value, line.speedup.low, line.speedup.high) for line in ordered]
        title = f"{suite}, batch {size}" if size > 1 else suite
        opened = " open" if number == 0 else ""
        parts.append(f"<details{opened}><summary>{escape(title)}</summary>{bars(items)}</details>")
    return "".join(parts)


def _acceptance(found: Sequence[Line]) -> str:
    first = next(iter(_groups(found).values()))
    series = {
        line.label: [(depth + 1, rate) for depth, rate in enumerate(line.by_depth[:10])] for line in first if line.by_depth
    }
    if not series:
        return ""
    plot = lines(series, x_title="position of the guess", y_title="accepted / tested", height=60 + max(260, 18 * len(series)))
    return f"<h2>Acceptance per position ({escape(first[0].suite)})</h2>{plot}"


def _costs(document: Mapping[str, Any]) -> str:
    curves = [Curve.from_json(data) for data in document.get("curves", ())]
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
        return ""
    suite = found[0].suite
    series: dict[str, list[tuple[float, float]]] = {}
    for line in found:
        if line.suite == suite:
            series.setdefault(line.label, []).append((line.batch_size, line.speed.value))
    return f"<h2>Speed against batch</h2>{lines(series, x_title='requests in a batch', y_title='tokens/s')}"


def _peers(document: Mapping[str, Any]) -> str:
    peers = document.get("peers")
    if not peers:
        return ""
    rows = [_peer_cells(entry) for entry in peers["lines"]]
    head = ["engine", "tokens/s", "95 %", "to its own plain", "to our plain", "to our best", "our text"]
    absent = "".join(f"<li>{escape(skip['name'])}: {escape(skip['reason'])}</li>" for skip in peers["skipped"])
    verdict = "".join(f"<li>{escape(text)}</li>" for text in peers["verdict"])
    return f"<h2>Other engines</h2>{_html_table(head, rows)}<ul>{verdict}</ul><p>Not measured:</p><ul>{absent}</ul>"


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
    for (size, suite), members in _groups(found).items():
        rows = [_cells(line) for line in [members[0], *sorted(members[1:], key=lambda line: -line.speedup.value)]]
        parts.append(f"<h3>{escape(suite)}{f', batch {size}' if size > 1 else ''}</h3>{_html_table(head, rows)}")
    return "".join(parts)


def _cells(line: Line) -> list[str]:
    return [
        line.label + ("" if line.lossless else " (lossy)"),
        f"{line.speed.value:.1f}",
        interval(line.speed, 1),
        f"{line.speedup.value:.2f}x",
        interval(line.speedup),
        f"{line.tokens_per_pass:.2f}",
        f"{line.acceptance:.1%}" if line.by_depth else "-",
        f"{line.waste:.0%}" if line.by_depth else "-",
        *(f"{line.split[part]:.0%}" for part in ("draft", "verify", "walk", "host")),
        f"{line.bandwidth_fraction:.0%}",
        size_text(line.memory),
        f"{line.identical:.0%}",
    ]


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _not_measured(document: Mapping[str, Any]) -> str:
    items = "".join(f"<li>{escape(skip['label'])}: {escape(skip['reason'])}</li>" for skip in document["skipped"])
    return f"<h2>Not measured</h2><ul>{items}</ul>" if items else ""


def _origin(document: Mapping[str, Any]) -> str:
    shown = {
        name: document[name] for name in ("provenance", "model", "drafts", "run", "bandwidth", "suites") if name in document
    }
    return f"<h2>Provenance</h2><pre>{escape(json.dumps(shown, indent=2, ensure_ascii=False))}</pre>"
