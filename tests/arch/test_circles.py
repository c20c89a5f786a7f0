"""No module imports itself through others, imports for type checking and inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sources import nodes

SOURCE = Path(__file__).parents[2] / "src"


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is its ``__init__.py``."""
    found: dict[str, Path] = {}
    for path in sorted((SOURCE / "outrider").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file names in its imports: ``from package import module`` names the module alone."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Some circle, its first module repeated at the end; empty without one."""
    done: set[str] = set()
    for start, first in graph.items():
        path: list[str] = []
        stack = [(start, iter(sorted(first)))] if start not in done else []
        while stack:
            name, further = stack[-1]
            if name not in path:
                path.append(name)
            following = next(further, None)
            if following is None:
                done.add(path.pop())
                stack.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                stack.append((following, iter(sorted(graph[following]))))
    return []


def test_the_search_finds_circles() -> None:
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"a"}}) == ["a", "a"]


def test_no_module_imports_itself_through_others() -> None:
    known = modules()
    graph = {name: set(imports_of(path, known)) for name, path in known.items()}
    circle = circle_in(graph)
    assert not circle, " imports ".join(circle)
