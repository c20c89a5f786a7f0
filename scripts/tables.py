"""Write measured figures into the pages: ``python scripts/tables.py`` fills every block between two comments from its file.

A block begins with ``<!-- results NAME -->`` and ends with ``<!-- end -->``. Between them stand the rows of
``benchmarks/results/NAME.json`` as a table, and a line that says how, where and when they were made. A figure inside a
sentence stands between ``<!-- figure NAME: TEMPLATE -->`` and ``<!-- end -->``. The template names keys of the file and of
its first row, or of the first row that has a value: ``<!-- figure NAME[KEY=VALUE; KEY=VALUE]: TEMPLATE -->``. So no such
figure is typed by hand. ``--check`` fails when a page is not what the files say.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure (\w+)(?:\[(.*?)\])?: (.*?) -->).*?(<!-- end -->)", re.DOTALL)


def cell(value: Any) -> str:
    """A figure as people read it: four digits of a small number, whole large ones, lists in a row."""
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", " ")


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose inner tables have become columns."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            columns |= {f"{name}: {inner}": figure for inner, figure in value.items()}
        else:
            columns[name] = value
    return {name.replace("_", " "): value for name, value in columns.items()}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows in Markdown, with every column that any of them has."""
    given = [flat(row) for row in rows]
    heads = list(dict.fromkeys(name for row in given for name in row))
    lines = [heads, ["---"] * len(heads), *([cell(row.get(name, "")) for name in heads] for row in given)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(name: str, document: Mapping[str, Any]) -> str:
    """Where figures come from, on one line."""
    made = f"<code>{document['command']}</code>; {document['machine']}; {document['date']}; commit: {document['commit']}"
    return f"<small>{document['what'][0].upper()}{document['what'][1:]}. {made}; <code>{name}.json</code></small>"


def document(name: str) -> dict[str, Any]:
    """A results file."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RESULTS.glob("*.json")))
        raise SystemExit(f"a page asks for the results {name!r}, and there is no {path.name}; there are {known}")
    return json.loads(path.read_text(encoding="utf-8"))


def block(name: str) -> str:
    """The text between the comments of a table."""
    found = document(name)
    return f"\n{table(found['rows'])}\n\n{origin(name, found)}\n\n"


def figure(name: str, chosen: str | None, template: str) -> str:
    """The text between the comments of a figure in a sentence."""
    found = document(name)
    wanted = [pair.split("=", 1) for pair in (chosen or "").split("; ") if pair]
    row = next((row for row in found["rows"] if all(str(row.get(key)) == value for key, value in wanted)), None)
    if row is None:
        raise SystemExit(f"a page asks for the row {chosen!r} of {name}.json, and there is none")
    return template.format_map({**found, **row})


def filled(text: str) -> str:
    """A page with all its tables and figures written anew."""
    text = BLOCK.sub(lambda match: match[1] + block(match[2]) + match[3], text)
    return FIGURE.sub(lambda match: match[1] + figure(match[2], match[3], match[4]) + match[5], text)


def pages() -> list[Path]:
    """Every page that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not what the files say")
    check = parser.parse_args().check
    stale: list[Path] = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(page.relative_to(ROOT))
            if not check:
                page.write_text(filled(text), encoding="utf-8")
    print(
        "\n".join(f"{page}: {'stale; run scripts/tables.py' if check else 'written'}" for page in stale) or "nothing to write"
    )
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
