"""The shape of the code: who may import whom, how large things may grow, and what the engine must not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, PACKAGE, ROOT, nodes, parsed

# Imports go down only; layers of one tuple never import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("cache",),
    ("models",),
    ("device",),
    ("engine", "drafters", "acceptance", "policies", "codecs", "bundled"),
    ("methods", "cuda_graphs", "outputs", "rehearsal", "vision"),
    ("opening", "requests"),
    ("api", "transformers", "vllm_plugin", "images"),
    ("server", "bench", "train", "viz", "async_api", "conversation", "offline", "routing"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def in_all_files(problems: Callable[[Path], Iterator[str]]) -> list[str]:
    """What is wrong, file by file: a rule tells everything at once."""
    return [f"{path.relative_to(PACKAGE)}: {problem}" for path in FILES for problem in problems(path)]


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports_of(path: Path) -> set[str]:
    """Names of outrider's own modules that a file imports."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "outrider":
            found.update([node.module] if node.module != "outrider" else [f"outrider.{a.name}" for a in node.names])
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "outrider")
    return found


def _imports_upwards(path: Path) -> Iterator[str]:
    mine = layer_of(path)
    if mine == "__init__":
        return
    if mine not in RANK:
        yield f"{mine} is in no layer; add it to LAYERS"
        return
    for module in imports_of(path):
        other = module.split(".")[1]
        if other not in RANK:
            yield f"imports {module}, which is in no layer"
        elif other != mine and RANK[other] >= RANK[mine]:
            yield f"{mine} may not import {other}"


def test_imports_go_down_only() -> None:
    assert not in_all_files(_imports_upwards)


def test_core_needs_only_torch() -> None:
    """The nouns depend on nothing but torch, so that any part can be used on its own."""
    allowed = {"torch", "outrider", "__future__"}
    import sys

    for path in (PACKAGE / "core").glob("*.py"):
        for node in nodes(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path} imports {name}"


STILL_LARGE: tuple[str, ...] = ()
"""Files that are to be split: none may join them, and none may grow beyond 500 lines."""


def _too_large(path: Path) -> Iterator[str]:
    limit = 500 if path.relative_to(PACKAGE).as_posix() in STILL_LARGE else 300
    if len(path.read_text().splitlines()) > limit:
        yield f"split the file: it has more than {limit} lines"
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.end_lineno is None or node.end_lineno - node.lineno >= 60:
                yield f"{node.name} is too long"
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = len([a for a in arguments if a.arg not in ("self", "cls")])
            public_entry = path.name == "api.py" and node.name == "__init__"
            marks = map(ast.unparse, node.decorator_list)
            is_kernel = any(mark.startswith(("triton.jit", "gluon.jit")) for mark in marks)  # pointers and sizes
            if count > 7 and not public_entry and not is_kernel:
                yield f"{node.name} takes {count} parameters"


def test_sizes() -> None:
    assert not in_all_files(_too_large)


def test_sizes_of_native_sources() -> None:
    """A header or source of the native pass owns one idea too."""
    for ending in ("hpp", "cpp"):
        for path in (*PACKAGE.rglob(f"*.{ending}"), *(ROOT / "scripts").glob(f"*.{ending}")):
            assert len(path.read_text().splitlines()) <= 300, f"split {path}: it has more than 300 lines"


def test_median_file_is_small() -> None:
    sizes = sorted(len(path.read_text().splitlines()) for path in FILES)
    assert sizes[len(sizes) // 2] <= 140


def test_median_function_is_small() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = (node for path in FILES for node in nodes(path) if isinstance(node, kinds))
    sizes = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    assert sizes[len(sizes) // 2] <= 8


def _badly_named(path: Path) -> Iterator[str]:
    banned = {"utils", "util", "helpers", "helper", "common", "misc"}
    if banned & set(path.relative_to(PACKAGE).with_suffix("").parts) or path.stem.endswith("_v2"):
        yield "the name says nothing"
    if not ast.get_docstring(parsed(path)):
        yield "a module says its idea in its docstring"


def test_names_and_docstrings() -> None:
    assert not in_all_files(_badly_named)


def test_docstrings_stand_alone() -> None:
    """No docstring goes on from the one above it: it is read on hover, alone."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                text = node.value.value
                assert not text.startswith(("...", "Of a ", "Of an ", "Of the ")), f"{path}:{node.lineno} is a fragment"


def _probes(path: Path) -> Iterator[str]:
    calls = {"hasattr", "getattr", "setattr"}
    for node in () if path.name.startswith("hf") else nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
            yield f"line {node.lineno} probes an object"


def test_no_probing_of_our_own_objects() -> None:
    """hasattr/getattr hide an interface. Third-party objects may be probed in the HF adapter only."""
    assert not in_all_files(_probes)


def test_engine_knows_no_method() -> None:
    """No method's, drafter's or rule's name in the layers that serve all of them."""
    from outrider.methods import METHODS, RULES

    words = {row.drafter.__name__ for row in METHODS.values()} | {row.rule.__name__ for row in RULES.values()}
    words |= {name for name in METHODS if "-" in name} | {name.replace("-", "_") for name in METHODS if "-" in name}
    pattern = re.compile(r"\b(" + "|".join(sorted(map(re.escape, words))) + r")\b")
    for folder in ("engine", "cache", "server"):
        for path in (PACKAGE / folder).rglob("*.py"):
            found = pattern.search(path.read_text())
            assert found is None, f"{path} names {found and found.group()}"


def _class_names(path: Path) -> set[str]:
    return {node.name for node in nodes(path) if isinstance(node, ast.ClassDef)}


@cache
def _homes() -> dict[str, str]:
    """Classes of drafters, rules and policies, and their folder; without names that are also found elsewhere."""
    rooms = ("drafters", "acceptance", "policies", "device")
    elsewhere = {name for path in FILES if layer_of(path) not in rooms for name in _class_names(path)}
    return {name: layer_of(path) for path in FILES if layer_of(path) in rooms for name in _class_names(path) - elsewhere}


def _asked_for(tree: Iterable[ast.AST]) -> Iterator[tuple[int, set[str]]]:
    """Lines that ask for classes, by ``isinstance``, ``issubclass`` or a pattern of ``match``, with the names they ask for."""
    for node in tree:
        asked: ast.AST | None = node.cls if isinstance(node, ast.MatchClass) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            asked = node.args[1]
        if asked is not None:
            parts = list(ast.walk(asked))
            names = {part.id for part in parts if isinstance(part, ast.Name)}
            line = asked.lineno if isinstance(asked, ast.expr) else 0
            yield line, names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def _asks_for_a_part(path: Path) -> Iterator[str]:
    for line, names in _asked_for(nodes(path)):
        foreign = {name for name in names & set(_homes()) if _homes()[name] != layer_of(path)}
        if foreign:
            yield f"line {line} asks for {foreign}"


def test_nobody_asks_for_a_part_by_its_class() -> None:
    """What a drafter, rule or policy can do is declared by it; ``isinstance`` on its class is for its own folder."""
    assert {"HeadDrafter", "Coupled", "Adaptive"} <= set(_homes())
    assert not in_all_files(_asks_for_a_part)


def test_asking_for_a_class_is_seen_in_every_form() -> None:
    for text in ("isinstance(x, Coupled)", "isinstance(x, (int, rules.Coupled))", "issubclass(type(x), Coupled)",
                 "match x:\n    case Coupled(): ...", "match x:\n    case rules.Coupled(): ..."):  # fmt: skip
        assert any("Coupled" in names for _, names in _asked_for(ast.walk(ast.parse(text)))), text


def test_public_names_are_pinned() -> None:
    import outrider

    assert sorted(outrider.__all__) == sorted(
        """LLM METHODS POLICIES RULES AsyncLLM CompositionError Grammar Method MethodRow ModelError OptionError Origin
        OutriderError RequestError RequestOutput SamplingParams Stats StreamChunk __version__ compose register""".split()
    )
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None


def test_every_row_has_a_page_and_a_paper() -> None:
    from outrider.methods import METHODS, RULES

    for name, row in METHODS.items():
        assert (ROOT / "docs" / "methods" / f"{name}.md").is_file(), f"docs/methods/{name}.md is missing"
        assert row.paper and row.summary
    for name, row in RULES.items():
        assert row.paper and row.summary
        assert not row.needs or (ROOT / "docs" / f"{name}.md").is_file(), f"docs/{name}.md says how to get {row.needs}"


def test_classes_are_abstract_or_final() -> None:
    """A concrete class of ours is not subclassed: behaviour is composed, not overridden."""
    bases: dict[str, list[str]] = {}
    abstract: set[str] = set()
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.ClassDef):
                continue
            names = [ast.unparse(base).split("[")[0] for base in node.bases]
            bases[node.name] = names
            inner = (child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
            marks = {ast.unparse(mark) for child in inner for mark in child.decorator_list}
            if "ABC" in names or "Protocol" in names or "abstractmethod" in marks:
                abstract.add(node.name)
    errors = {name for name, above in bases.items() if any(b.endswith("Error") for b in above)}
    for name, above in bases.items():
        for base in above:
            if base in bases:
                assert base in abstract or base in errors, f"{name} subclasses the concrete class {base}"


def test_public_classes_have_names_of_their_own() -> None:
    """A stranger who searches for a class finds one."""
    homes = dict[str, list[str]]()
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_the_rules_find_what_breaks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that breaks every rule of a file."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "cache" / "utils.py"
    path.parent.mkdir()
    parameters = ", ".join(f"a{number}" for number in range(8))
    path.write_text(f"import outrider.cli\n\ndef f({parameters}):\n" + "    hasattr(a0, 'x')\n" * 300)
    assert list(_imports_upwards(path)) == ["cache may not import cli"]
    assert len(list(_too_large(path))) == 3
    assert len(list(_badly_named(path))) == 2
    assert len(list(_probes(path))) == 300
