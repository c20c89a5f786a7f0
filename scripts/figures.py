"""Every figure says where it comes from: ``python scripts/figures.py`` lists those that do not.

A figure is a number with a unit of speed, time or share, such as 1.71x, 12 ms or 40 %, or a decimal in a table. Figures that
``scripts/tables.py`` writes need nothing more. A typed one must stand in a results file, rounded as it was typed. Its section
names that file or shows it as a table, or its paragraph links a page that does.

Figures that are not ours quote their source in the same paragraph or row. Settings are no figures, and neither is what a test
named in the paragraph asserts. Records of decisions are left out: they are dated, and hold the figures of their day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tables
from prose import Finding

FIGURE = re.compile(
    r"(?<![\w.-])(?P<number>\d[\d,]*(?:\.\d+)?)\s?"
    r"(?P<unit>(?<=\d)x(?![\w ]*\d)\b|tokens/s\b|tokens (?:per|a) (?:second|pass)|ms\b|us\b|milliseconds|microseconds|%|"
    r"times (?:as fast|faster))"
)
QUOTED = re.compile(r"arXiv|https?://|[Pp]ublished|[Pp]apers?\b|[Aa]uthors?\b|[Dd]ata[ -]?sheets?\b|tests/\w+")
"""Words of a paragraph whose figures are somebody else's, or are what a test asserts."""
SETTING = re.compile(r"\(`\w+`\)|\(`--[\w-]+`|`--[\w-]+` \(|\bintervals?\b|default|\bat (?:most|least)\b")
"""Words of a sentence whose number is a setting or a limit, and not a measurement."""
_DECIMAL = re.compile(r"(?<![\w.-])(?P<number>\d+\.\d+)(?P<unit>)(?![\w.])")
_SETTINGS = re.compile(r"^\|\s*(option|field|setting[^|]*|name|word|family)\s*\|", re.IGNORECASE)
"""First heads of tables that explain: their decimals are settings or names of versions."""
_SCALES = {
    "%": (1, 100),
    "ms": (1, 1e3),
    "milliseconds": (1, 1e3),
    "us": (1, 1e3, 1e6),
    "microseconds": (1, 1e3, 1e6),
    "": (1, 100, 1e3),
}
"""By what a number of a file may be multiplied, for each unit: files hold shares and seconds too."""
_CODE = re.compile(r"`[^`]*`")
_FILE = re.compile(r"\b(\w+)\.json\b|<!-- (?:results|figure) (\w+)")
_LINK = re.compile(r"\]\(([\w./-]+\.md)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ ", re.MULTILINE)
_PARAGRAPH = re.compile(r"(?:^[ ]*\S.*\n?)+", re.MULTILINE)


_ORIGIN = ("command", "machine", "date", "commit", "what", "note", "page")
"""Keys of a results file, and of its rows, that say how it was made."""


@cache
def numbers(name: str, page: str) -> frozenset[float]:
    """The measured numbers of a results file. Of rows that name their page, those of this page count."""
    document = json.loads((tables.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    rows = [row for row in document["rows"] if not isinstance(row, dict) or row.get("page", page) == page]
    return frozenset(_numbers({**document, "rows": rows}))


def _numbers(value: Any) -> Iterator[float]:
    match value:
        case bool():
            return
        case int() | float():
            yield abs(float(value))
        case str():
            yield from (float(number) for number in re.findall(r"\d+(?:\.\d+)?", value.replace(",", "")))
        case dict():
            yield from (found for key, inner in value.items() if key not in _ORIGIN for found in _numbers(inner))
        case list():
            yield from (found for inner in value for found in _numbers(inner))


def stands(number: str, unit: str, found: frozenset[float]) -> bool:
    """Whether a typed number is one of these, rounded."""
    text = number.replace(",", "")
    half = 0.5001 * 10.0 ** -len(text.partition(".")[2])
    scaled = {scale * one for scale in _SCALES.get(unit, (1,)) for one in found}
    scaled |= {100 * abs(1 - one) for one in found} if unit == "%" else set[float]()  # 0.94 of plain is 6 % slower
    return any(abs(one - float(text)) <= half for one in scaled)


@dataclass(frozen=True)
class Source:
    """A results file, and the page that names it."""

    name: str
    page: str


def sources(page: str, text: str) -> set[Source]:
    """The results files that a text of a page names or shows."""
    named = {name for pair in _FILE.findall(text) for name in pair if name}
    return {Source(name, page) for name in named if (tables.RESULTS / f"{name}.json").is_file()}


def linked(page: str, text: str) -> set[Source]:
    """The results files of the pages that a text links."""
    targets = [((tables.ROOT / page).parent / link).resolve() for link in _LINK.findall(text)]
    read = ((str(path.relative_to(tables.ROOT)), path.read_text(encoding="utf-8")) for path in targets if path.is_file())
    return set[Source]().union(*(sources(other, words) for other, words in read))


def untraced(page: str, text: str) -> Iterator[Finding]:
    """The figures of a page that do not say where they come from."""
    written = _blanked(text)
    for begin, end in _sections(text):
        named = sources(page, text[begin:end])
        for paragraph in _PARAGRAPH.finditer(written, begin, end):
            number = text.count("\n", 0, paragraph.start()) + 1
            is_table = paragraph[0].lstrip().startswith("|")
            pieces = _rows(paragraph[0]) if is_table else [paragraph[0]]
            originals = text[paragraph.start() : paragraph.end()].splitlines() if is_table else [text[slice(*paragraph.span())]]
            for line, (piece, original) in enumerate(zip(pieces, originals)):
                files = named | linked(page, original)
                for missing in _missing(piece, files, in_table=is_table):
                    at = number + line + piece.count("\n", 0, missing.start())
                    known = ", ".join(sorted({source.name for source in files})) or "none is"
                    yield Finding(page, at, f"{missing[0]!r} is in no results file that is named here ({known})")


def _rows(table: str) -> list[str]:
    """The rows of a table without the columns that quote others. A table of settings has no figures."""
    lines = table.splitlines()
    heads = lines[0].split("|")
    if _SETTINGS.match(lines[0]):
        return []
    quoted = {place for place, head in enumerate(heads) if QUOTED.search(head)}
    kept = ([cell for place, cell in enumerate(line.split("|")) if place not in quoted] for line in lines)
    return ["|".join(cells) for cells in kept]


def _missing(piece: str, files: set[Source], *, in_table: bool) -> Iterator[re.Match[str]]:
    """The figures of a paragraph or row that stand in none of these files."""
    if QUOTED.search(piece):
        return
    bare = _CODE.sub(lambda match: " " * len(match[0]), piece)
    known = frozenset[float]().union(*(numbers(source.name, source.page) for source in files))
    for found in (*FIGURE.finditer(bare), *(_DECIMAL.finditer(bare) if in_table else ())):
        begin = piece.rfind(". ", 0, found.start()) + 1
        sentence = piece[begin:].partition(". ")[0]
        if not SETTING.search(sentence) and not stands(found["number"], found["unit"], known):
            yield found


def _blanked(text: str) -> str:
    """The page without its generated figures and its code, with every line at its place."""
    for pattern in (tables.BLOCK, tables.FIGURE, _FENCE):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def _sections(text: str) -> Iterator[tuple[int, int]]:
    """Where each section begins and ends. Lines of code that begin with # are no headings."""
    starts = [0, *(match.start() for match in _HEADING.finditer(_FENCE.sub(lambda match: " " * len(match[0]), text)))]
    yield from zip(starts, [*starts[1:], len(text)], strict=True)


def pages() -> list[Path]:
    """The README and every page of the site but the records of decisions."""
    return [page for page in tables.pages() if page.parent.name != "decisions"]


def main() -> int:
    found = [one for page in pages() for one in untraced(str(page.relative_to(tables.ROOT)), page.read_text(encoding="utf-8"))]
    print("\n".join(map(str, found)) or "every figure says where it comes from")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
