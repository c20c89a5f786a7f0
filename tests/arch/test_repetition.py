"""No six lines of code stand twice in the package, its programs or its tests, to the letter.

Imports, docstrings, comments and lone brackets do not count. Kernels in C++ and the scripts of pages count like Python.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from sources import PACKAGE, nodes

ROOT = Path(__file__).parents[2]
ROOMS = ("src/outrider", "benchmarks", "scripts", "recipes", "examples", "tests")
ENDINGS = (".py", ".hpp", ".cpp", ".js", ".mjs", ".css", ".sh")
_RUN = 6
_OUTER = (ast.stmt, ast.excepthandler, ast.match_case)
_NO_CODE = ("#", "@", "//", "/*", "*", "import ")


def _explained(path: Path) -> set[int]:
    """Numbers of the lines of a Python file that are docstrings or imports."""
    left_out = set[int]()
    for node in nodes(path) if path.is_relative_to(PACKAGE) else _statements(ast.parse(path.read_text())):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return left_out


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Everything in a file but the expressions inside of statements, which are most of it."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        left += [
            child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]


def _code(path: Path) -> list[tuple[int, str]]:
    """Numbers and texts of the lines that count."""
    source = path.read_text()
    left_out = _explained(path) if path.suffix == ".py" else set[int]()
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))
    return [
        (number, line) for number, line in lines if len(line) > 3 and not line.startswith(_NO_CODE) and number not in left_out
    ]


def repeated(paths: Iterable[Path]) -> list[list[str]]:
    """Places of every run of lines that stands more than once."""
    places = defaultdict[tuple[str, ...], list[str]](list)
    for path in paths:
        lines = _code(path)
        for begin in range(len(lines) - _RUN + 1):
            run = tuple(line for _, line in lines[begin : begin + _RUN])
            places[run].append(f"{path.name}:{lines[begin][0]}")
    return [found for found in places.values() if len(found) > 1]


def test_no_lines_stand_twice() -> None:
    assert not repeated(sorted(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in ENDINGS))


def test_the_search_finds_lines_that_do(tmp_path: Path) -> None:
    body = "\n".join(f"    value_{number} = number + {number}" for number in range(_RUN))
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(f'"""{name}"""\n\nimport os\n\n\ndef {name}(number: int) -> None:\n{body}\n')
    assert repeated(sorted(tmp_path.glob("*.py"))) == [["one.py:7", "other.py:7"]]
