"""The rooms of the drafters: a method's file has its name and declares its row, and every room builds on the tree kit."""

from __future__ import annotations

import ast
import importlib
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import nodes, parsed

from outrider.methods import METHODS

DRAFTERS = Path(__file__).parents[2] / "src" / "outrider" / "drafters"
ROOMS = ("copying", "model", "heads", "itself", "mixed")


NAMES = tuple(METHODS)


def file_name(method: str) -> str:
    """A method's file: its name with ``_`` for ``-``; a word of the language gets a ``_`` behind it."""
    stem = method.replace("-", "_")
    return f"{stem}_" if keyword.iskeyword(stem) else stem


def declares_row(path: Path) -> bool:
    names = (target for node in parsed(path).body if isinstance(node, ast.Assign) for target in node.targets)
    return any(isinstance(name, ast.Name) and name.id == "ROW" for name in names)


@pytest.mark.parametrize("method", NAMES)
def test_a_methods_file_has_its_name_and_declares_its_row(method: str) -> None:
    found = [path for path in DRAFTERS.rglob(f"{file_name(method)}.py") if declares_row(path)]
    assert len(found) == 1, f"{method} is declared by {len(found)} files named {file_name(method)}.py under drafters/"
    module = ".".join(found[0].relative_to(DRAFTERS.parents[1]).with_suffix("").parts)
    assert importlib.import_module(module).ROW is METHODS[method]
    assert METHODS[method].build.__module__ == module, "a row is built in its own file"


def test_every_declared_row_is_in_the_table() -> None:
    files = {path.stem for path in DRAFTERS.rglob("*.py") if declares_row(path)}
    assert files == {file_name(method) for method in NAMES}


def test_every_room_has_methods() -> None:
    rooms = {path.parent.name for path in DRAFTERS.rglob("*.py") if declares_row(path)}
    assert rooms == {*ROOMS, DRAFTERS.name}, "plain decoding alone stands outside the rooms"


def test_the_tree_kit_knows_no_room() -> None:
    for path in (DRAFTERS / "trees").glob("*.py"):
        for room in ROOMS:
            assert f"outrider.drafters.{room}" not in path.read_text(), f"{path.name} imports from {room}/"


def test_a_kind_of_heads_has_one_file_and_one_method() -> None:
    from outrider.models.heads.kinds import KINDS

    for name, kind in KINDS.items():
        module = importlib.import_module(f"outrider.models.heads.{file_name(name)}")
        assert module.KIND is kind and kind.name == name and name in METHODS
        assert kind.module.__module__ == module.__name__, "the module of a kind is in the kind's own file"


def test_drafters_are_frozen() -> None:
    """A drafter sets attributes of itself only while it is made: what evolves is a request's state, or a lasting memory."""
    from outrider.core.interfaces import Drafter

    def below(cls: type) -> set[type]:
        return {cls}.union(*(below(sub) for sub in cls.__subclasses__()))

    ours = {(cls.__module__, cls.__name__) for cls in below(Drafter) if cls.__module__.startswith("outrider.drafters")}
    assert len(ours) > 30
    for path in DRAFTERS.rglob("*.py"):
        module = ".".join(path.relative_to(DRAFTERS.parents[1]).with_suffix("").parts)
        for cls in nodes(path):
            if isinstance(cls, ast.ClassDef) and (module, cls.name) in ours:
                for method in cls.body:
                    if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                        assert not list(changes_of_self(method)), f"{module}.{cls.name}.{method.name} changes the drafter"


def changes_of_self(method: ast.FunctionDef) -> Iterator[ast.Attribute]:
    """Attributes of ``self`` that a method assigns."""
    for node in ast.walk(method):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for target in (part for whole in targets for part in ast.walk(whole)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) and ast.unparse(target.value) == "self":
                yield target


LARGE_ROOMS = ("core", "models", "server", "cli", "train", "bench", "drafters/heads")
"""Rooms of many files, whose ``__init__.py`` says to a newcomer what each file is for."""


@pytest.mark.parametrize("room", LARGE_ROOMS)
def test_a_large_room_says_where_each_file_belongs(room: str) -> None:
    folder = DRAFTERS.parent / room
    guide = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = set(re.findall(r"\w+", guide))
    missing = {path.stem for path in folder.glob("*.py")} - named - {"__init__"}
    assert not missing, f"{room}/__init__.py does not say what these are: {sorted(missing)}"


def test_the_page_of_the_architecture_names_every_room_and_module() -> None:
    """Folders of the package at any depth that hold code, and the modules beside them."""
    package = DRAFTERS.parent
    page = (package.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+?)/?(?:\.py)?`", page))
    rooms = {path.parent.relative_to(package).as_posix() for path in package.rglob("*.py")} - {"."}
    tops = {room for room in rooms if "/" not in room or room.split("/")[0] in ("drafters", "models")}
    modules = {path.stem for path in package.glob("*.py") if not path.stem.startswith("_")}
    assert not (tops | modules) - named, sorted((tops | modules) - named)
