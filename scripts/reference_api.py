"""The page of the Python API, ``docs/api.md``: every public name of the package with its signature and its docstring.

It is read out of the sources, so that the fields of a class stand there with the docstring below each of them. ``reference.py``
writes it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import outrider
from outrider import METHODS, POLICIES, RULES

_WIDTH = 116
_INTRODUCTION = """# Python API

This page is written by `python scripts/reference.py` from the docstrings of `outrider.__all__`. Everything else may
change without notice.
"""
_TABLES = {"METHODS": METHODS, "RULES": RULES, "POLICIES": POLICIES}
_TABLE_WORDS = {
    "METHODS": "Every method by its name, a `MethodRow` each.",
    "RULES": "Every acceptance rule by its name.",
    "POLICIES": "Every policy by its name.",
}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose(docstring: str | None) -> str:
    """A clean docstring as Markdown: paragraphs are wrapped, indented blocks are code, and double backquotes become single."""
    parts = (part.strip("\n") for part in re.split(r"\n\s*\n", docstring or ""))
    return "\n\n".join(_block(part) if _is_code(part) else _paragraph(part) for part in parts if part)


def _is_code(text: str) -> bool:
    return text.startswith(" ") or all(line.startswith(("outrider ", "python ", " ")) for line in text.splitlines())


def _block(text: str) -> str:
    return f"```text\n{textwrap.dedent(text)}\n```"


def _paragraph(text: str) -> str:
    """A paragraph, or a list whose items begin with ``- ``."""
    if not text.startswith("- "):
        return _wrapped(text)
    items = re.split(r"\n(?=- )", text)
    return "\n".join(_wrapped(item).replace("\n", "\n  ") for item in items)


def _wrapped(text: str) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def definition(name: str) -> Definition:
    """The source of a public class or function."""
    thing = getattr(outrider, name)
    module = Path(inspect.getsourcefile(thing) or "")
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, Definition) and node.name == name:
            return node
    raise LookupError(f"{module} does not define {name}")


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str | None = None) -> str:
    """How a function is called, one parameter a line where that is long. Types stay, ``self`` goes."""
    arguments = ast.parse(ast.unparse(function.args).join(("def f(", "): pass"))).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    given = arguments.args
    if given.args and given.args[0].arg in ("self", "cls"):
        del given.args[0]
    text = ast.unparse(given)
    result = f" -> {ast.unparse(function.returns)}" if function.returns and name is None else ""
    start = "async def " if isinstance(function, ast.AsyncFunctionDef) else ""
    line = f"{start}{name or function.name}({text}){result}"
    if len(line) <= _WIDTH:
        return line
    parts = re.split(r", (?=(?:\*{0,2}\w+: )|\*,|/,|\*$)", text)
    return f"{start}{name or function.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def fields(of: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Declaration and docstring of every public field of a class."""
    for node, following in zip(of.body, [*of.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            yield ast.unparse(node), inspect.cleandoc(str(following.value.value)) if is_text else ""  # type: ignore[union-attr]


def members(of: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public methods and properties of a class."""
    for node in of.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _class(node: ast.ClassDef) -> Iterator[str]:
    made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if made is not None:
        yield _code(signature(made, node.name))
    yield prose(ast.get_docstring(node)) + "\n"
    if made is not None and ast.get_docstring(made):
        yield prose(ast.get_docstring(made)) + "\n"
    if found := list(fields(node)):
        rows = (f"| `{_cell(declared)}` | {_cell(prose(said))} |" for declared, said in found)
        yield "| field | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    for member in members(node):
        yield f"### `{node.name}.{member.name}`\n"
        marks = {ast.unparse(mark) for mark in member.decorator_list}
        if not marks & {"property", "cached_property"}:
            yield _code(signature(member))
        said = prose(ast.get_docstring(member))
        if said:
            yield said + "\n"


def entry(name: str) -> str:
    """What the page says of a public name."""
    if name == "__version__":
        return "## `__version__`\n\nThe version of the package, a string.\n"
    if name in _TABLES:
        return f"## `{name}`\n\n{_TABLE_WORDS[name]} [Methods, rules, policies](reference.md) lists all {len(_TABLES[name])}.\n"
    node = definition(name)
    if isinstance(node, ast.ClassDef):
        return "\n".join([f"## `{name}`\n", *_class(node)])
    return "\n".join([f"## `{name}`\n", _code(signature(node)), prose(ast.get_docstring(node)) + "\n"])


def page() -> str:
    """The whole page; what users meet first stands first."""
    first = ["LLM", "SamplingParams", "RequestOutput", "StreamChunk", "Stats", "Origin", "AsyncLLM", "Grammar", "compose"]
    rest = [name for name in outrider.__all__ if name not in first]
    return "\n".join([_INTRODUCTION, *map(entry, [*first, *rest])])
