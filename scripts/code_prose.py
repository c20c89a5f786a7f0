"""Prose inside Python files: docstrings, help texts of options, and messages of errors. ``prose.py`` checks them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OPENING = re.compile(
    r"\.\.\.|(?:The same|As|Like) (?:`|(?:for|in|of|with|from|without)\b)|The same[.,;:]"
    r"|(?:Of|Also|And|But|Or|Likewise|Ditto)\b"
    r"|What (?:it|they|is|was|were|came|comes|has|had|may|must|became|stands|this|that|there|differs)\b"
)
"""Beginnings of docstrings that say nothing without the lines above them. They are read on hover, alone."""
_LAYOUT = re.compile(r"^ *(?:outrider |\+)|\S {3,}\S")
"""Lines of commands, tables and formulas. They become rows of a table, which is no prose."""
_CODE = re.compile(r"``[^`]+``")


@dataclass(frozen=True)
class CodeText:
    """A text of a Python file, in Markdown."""

    line: int
    kind: str
    """"docstring", "help" or "error"."""
    text: str

    @property
    def opening(self) -> str | None:
        """The first words of a docstring that does not stand alone."""
        match = _OPENING.match(self.text) if self.kind == "docstring" else None
        return match[0].rstrip("` ") if match else None


def texts(source: str) -> Iterator[CodeText]:
    """The docstrings, help texts and error messages of a file, in no particular order."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield CodeText(node.lineno, "docstring", _markdown(node.value.value, node.col_offset))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            yield from _message(node.value, "help")
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                yield from _message(argument, "error")


def files(root: Path) -> list[Path]:
    """The Python files of the package, and the programs beside it."""
    rooms = (root / room for room in ("src/outrider", "scripts", "benchmarks", "recipes", "examples"))
    return sorted(path for room in rooms for path in room.rglob("*.py"))


def _markdown(text: str, indent: int) -> str:
    """A docstring without its indentation, in which formulas and tables are indented code."""
    lines = [line[indent:] if line[:indent].isspace() else line for line in text.splitlines()]
    lines = [f"| {line}" if _LAYOUT.search(line) else line for line in lines]
    return _CODE.sub("`code`", "\n".join(lines))


def _message(node: ast.expr, kind: str) -> Iterator[CodeText]:
    """The words of a text, with a word in the place of every value. Clauses behind a semicolon are sentences of their own."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    if isinstance(node, ast.Constant | ast.JoinedStr):
        words = [part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "value" for part in parts]
        text = "".join(words)
        yield CodeText(node.lineno, kind, re.sub(r"[;:]\s+(\w)", lambda match: f". {match[1].upper()}", text))
