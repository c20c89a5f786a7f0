"""The package as syntax trees. Every file is read and walked once for all tests of the code's shape."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outrider"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Everything in a file. It stays until the end, so no collection of garbage needs to look at these millions of objects."""
    gc.disable()
    found = tuple(ast.walk(parsed(path)))
    gc.freeze()
    gc.enable()
    return found
