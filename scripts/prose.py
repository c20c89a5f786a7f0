"""Check the project's prose: ``python scripts/prose.py [FILE ...]`` prints what to mend and fails if there is anything.

It looks at paragraphs and list items of Markdown files, not at code, tables, headings or quotes. A sentence has at most 30
words and no word of ``BANNED``, and a line has at most 120 characters. Files named in the numbered lists of CONTRIBUTING.md
must exist.

In Python files it looks at docstrings, help texts and messages of errors. The same limits hold there, except for lines. A
docstring must also stand alone: editors show it without the lines above it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import code_prose

ROOT = Path(__file__).parents[1]
MOST_WORDS = 30
MOST_CHARACTERS = 120
BANNED = {
    "blazing": "give a figure",
    "in order to": "write 'to'",
    "leverage": "write 'use'",
    "obviously": "leave it out",
    "of course": "leave it out",
    "seamless": "say what happens",
    "seamlessly": "say what happens",
    "simply": "leave it out",
    "utilise": "write 'use'",
    "utilize": "write 'use'",
}
"""A word, and what to do instead."""

_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
_FENCE = re.compile(r"^\s*(```|~~~)")
_NO_PROSE = re.compile(r"^\s*(\||#|<|>|!\[|---\s*$|\[[^\]]+\]:)")
_ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+")
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]+`")
_END = re.compile(r"(?<=[.!?])[\"'”*)]*\s+(?=[\"“'*(\[]*[A-Z0-9])")
_JOURNEY = re.compile(r"^(\d+)\. `([^`]+)`:")


@dataclass(frozen=True)
class Finding:
    """One thing to mend."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Paragraph:
    """Lines of prose that belong together."""

    line: int
    """Number of the first one."""
    lines: Sequence[str]

    @property
    def sentences(self) -> list[str]:
        """Its sentences. Code counts as one word, links as their text."""
        text = " ".join(line.strip() for line in self.lines)
        text = _CODE.sub("Code", _LINK.sub(r"\1", _IMAGE.sub("", _ITEM.sub("", text))))
        return [sentence for sentence in _END.split(text) if sentence.strip()]


def paragraphs(text: str) -> Iterator[Paragraph]:
    """The paragraphs and list items of a Markdown text."""
    begin, lines, fenced = 0, [], False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_fence = bool(_FENCE.match(line))
        is_code = fenced or is_fence or (not lines and line.startswith("    ") and not _ITEM.match(line))
        ends = is_code or not line.strip() or bool(_NO_PROSE.match(line))
        if lines and (ends or _ITEM.match(line)):
            yield Paragraph(begin, lines)
            lines = []
        if not ends:
            begin = begin if lines else number
            lines = [*lines, line]
        fenced ^= is_fence


def check_text(text: str, path: str) -> list[Finding]:
    """Everything to mend in a Markdown text."""
    return [finding for paragraph in paragraphs(text) for finding in _check(paragraph, path)]


def _check(paragraph: Paragraph, path: str) -> Iterator[Finding]:
    for number, line in enumerate(paragraph.lines, paragraph.line):
        if len(line) > MOST_CHARACTERS:
            yield Finding(path, number, f"a line of {len(line)} characters; wrap it at {MOST_CHARACTERS}")
    yield from _check_sentences(paragraph, path)


def _check_sentences(paragraph: Paragraph, path: str) -> Iterator[Finding]:
    for sentence in paragraph.sentences:
        words = [word for word in sentence.split() if any(map(str.isalnum, word))]
        if len(words) > MOST_WORDS:
            start = " ".join(words[:6])
            yield Finding(path, paragraph.line, f"a sentence of {len(words)} words; split it: {start} ...")
        for banned in _BANNED.findall(sentence):
            yield Finding(path, paragraph.line, f"the word {banned.lower()!r}; {BANNED[banned.lower()]}")


def check_code(source: str, path: str) -> list[Finding]:
    """Everything to mend in the prose of a Python file."""
    found: list[Finding] = []
    for one in code_prose.texts(source):
        if one.opening:
            found.append(Finding(path, one.line, f"a docstring that begins with {one.opening!r}; say what it is about"))
        for paragraph in paragraphs(one.text):
            moved = Paragraph(one.line + paragraph.line - 1, paragraph.lines)
            found += _check_sentences(moved, path)
    return sorted(found, key=lambda finding: finding.line)


def check_journeys(text: str, path: str, root: Path) -> list[Finding]:
    """Files that numbered lists name and that do not exist, and lists of more than five.

    Paths start at ``src/outrider/`` or at ``tests/``."""
    found: list[Finding] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _JOURNEY.match(line)
        if match is None:
            continue
        name = match.group(2)
        if int(match.group(1)) > 5:
            found.append(Finding(path, number, "a journey of more than five files; shorten it"))
        folder = root if name.startswith("tests/") else root / "src" / "outrider"
        if not (folder / name).is_file():
            found.append(Finding(path, number, f"{name} does not exist; was it moved?"))
    return found


def documents(root: Path) -> list[Path]:
    """The Markdown files of the project that people read."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "src").rglob("*.md")])


def check_files(files: Iterable[Path], root: Path = ROOT) -> list[Finding]:
    """Everything to mend in the files."""
    found: list[Finding] = []
    for file in files:
        text, name = file.read_text(encoding="utf-8"), _name(file, root)
        found += check_code(text, name) if file.suffix == ".py" else check_text(text, name)
        if name == "CONTRIBUTING.md":
            found += check_journeys(text, name, root)
    return found


def _name(file: Path, root: Path) -> str:
    file = file.resolve()
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.as_posix()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="Markdown or Python files (default: all)")
    checked = parser.parse_args().files or [*documents(ROOT), *code_prose.files(ROOT)]
    found = check_files(checked)
    print("\n".join(map(str, found)) or f"{len(checked)} files, nothing to mend")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
