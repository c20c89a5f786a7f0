"""What a program can check of the errors: their classes, and that each text says what is wrong and what to do.

Texts are followed to where a function, its module or a helper builds them. A part that only a run knows counts as a word.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, PACKAGE, nodes, parsed

from outrider.core import errors

OURS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.OutriderError)}
CLASSES = OURS | {"ApiError", "GrammarTooLargeError", "GrammarTooDeepError"}
NEAREST = ("nearest", "closest")
"""Helpers that name the nearest valid name."""
UNSAID = "\0"
"""Stands for a part of a text that only a run knows."""


@dataclass(frozen=True)
class ErrorText:
    place: str
    text: str
    """With ``UNSAID`` for what only a run knows, and the name of a helper in its place."""


class Texts:
    """The texts of one scope: the names that are assigned once, and what they hold."""

    def __init__(self, *scopes: ast.AST) -> None:
        self._assigned: dict[str, list[ast.expr]] = {}
        for scope in scopes:
            for node in ast.walk(scope):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        pairs = zip(target.elts, node.value.elts) if _are_pairs(target, node.value) else [(target, node.value)]
                        for name, value in pairs:
                            if isinstance(name, ast.Name):
                                self._assigned.setdefault(name.id, []).append(value)

    def of(self, node: ast.expr, depth: int = 0) -> str:
        if depth > 4:
            return UNSAID
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(self.of(part, depth) for part in parts)
            case ast.FormattedValue(value=value) | ast.NamedExpr(value=value):
                return self.of(value, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.of(left, depth) + self.of(right, depth)
            case ast.BoolOp(values=[first, *_]):
                return self.of(first, depth)
            case ast.IfExp(body=body, orelse=other):
                return min(self.of(body, depth), self.of(other, depth), key=len)
            case ast.Name(id=name) if len(self._assigned.get(name, [])) >= 1:
                return self.of(self._assigned[name][-1], depth + 1)
            case ast.Call(func=ast.Name(id=name)) if name in NEAREST:
                return f"{name}()"
        return UNSAID


def _are_pairs(target: ast.expr, value: ast.expr) -> bool:
    return isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)


def error_texts(path: Path, root: Path = PACKAGE) -> Iterator[ErrorText]:
    """The text of every error of ours that is made in a file."""
    if not any(isinstance(node, ast.Call) and _name(node.func) in CLASSES for node in nodes(path)):
        return
    tree = parsed(path)
    constants = ast.Module([node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)], [])
    methods = [node for one in tree.body if isinstance(one, ast.ClassDef) for node in one.body]
    for function in [*tree.body, *methods]:
        made = [] if isinstance(function, ast.ClassDef) else [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        made = [node for node in made if _name(node.func) in CLASSES and node.args]
        texts = Texts(constants, function) if made else None
        for node in made:
            text = node.args[1] if _name(node.func) == "ApiError" and len(node.args) > 1 else node.args[0]
            yield ErrorText(f"{path.relative_to(root)}:{node.lineno}", texts.of(text) if texts else UNSAID)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


_REMEDIES = frozenset(
    "use give fetch leave check name write send correct train convert make pip load choose shorten build try save see call"
    " encode trim process measure open set add remove install order put join download ask start record resume run raise lower"
    " delete merge read drop draft export replace close keep restart change free".split()
)  # fmt: skip
"""Words with which it is said what to do. A part of a sentence begins with one of them, or a helper names the nearest name."""
_PARTS = re.compile(r"[;:,(] | and | or |, then ")


def says_what_to_do(text: str) -> bool:
    parts = _PARTS.split(text)[1:]
    return any(name in text for name in NEAREST) or any(part.split()[:1] and part.split()[0] in _REMEDIES for part in parts)


def problems(found: ErrorText) -> Iterator[str]:
    """What is wrong with a text."""
    text = found.text
    if not any(map(str.isalpha, text)):
        return  # handed on from elsewhere
    if len(text.split()) < 4:
        yield "says too little"
    if "\n" in text or text != text.strip() or text.endswith("."):
        yield "is not one line without a full stop"
    if not says_what_to_do(text) and not text.endswith(UNSAID):
        yield "does not say what to do"
    if text.startswith("unknown ") and not any(name in text for name in NEAREST):
        yield "does not name the nearest valid name"


@cache
def _all_texts() -> tuple[ErrorText, ...]:
    return tuple(text for path in FILES for text in error_texts(path))


def test_every_error_says_what_is_wrong_and_what_to_do() -> None:
    wrong = [f"{found.place}: {problem}: {found.text!r}" for found in _all_texts() for problem in problems(found)]
    assert not wrong, "\n".join(wrong)


def test_most_texts_can_be_followed() -> None:
    known = [found for found in _all_texts() if found.text.strip(UNSAID)]
    assert len(known) > 0.97 * len(_all_texts()) > 600


BUILTIN = {
    "__init__.py": "a module has no such attribute",
    "__main__.py": "ends the process",
    "acceptance/block.py": "a proof's own invariant",
    "core/prices.py": "the caller takes any ValueError for a file of another version",
    "core/rewinding.py": "a drafter broke its contract",
    "core/scores.py": "a mapping has no such key",
    "models/quantised/matrix.py": "the folder that was read explains it",
    "server/fleet/replica.py": "Ray reads it, or the handler of a signal",
    "server/keys.py": "pydantic says in which field",
    "server/protocol.py": "pydantic says in which field",
}
"""Files that raise errors of Python itself, with the reason. Others raise ours, which a user's program can catch together."""


def _raised(path: Path) -> Iterator[str]:
    """Names of the classes that a file raises."""
    for node in nodes(path):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield _name(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)


def test_users_get_errors_of_ours() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(isinstance(getattr(builtins, name, None), type) for name in _raised(path))
    }
    assert found == set(BUILTIN), "raise an error of core/errors.py, or say here why not"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("OptionError('size = 3 is not valid')", "does not say what to do"),
        ("OptionError(f'size = {x} is not valid; use 1 to {y}')", None),
        ("OptionError(f'unknown colour {x!r}; use red')", "does not name the nearest valid name"),
        ("OptionError(f'unknown colour {x!r}; {nearest(x, y)}')", None),
        ("ApiError(400, f'{message}.', param='size')", "is not one line without a full stop"),
        ("ModelError(what + '; fetch it again')", None),
        ("ModelError('damaged')", "says too little"),
    ],
)
def test_the_rules_find_what_breaks_them(source: str, problem: str | None, tmp_path: Path) -> None:
    lines = ["def work(x, y):", "    message = 'the size is wrong; use another'", "    what = f'{x} is damaged'"]
    path = tmp_path / "wrong.py"
    path.write_text("\n".join([*lines, f"    raise {source}", ""]))
    [found] = error_texts(path, tmp_path)
    assert problem in [*problems(found), None] and bool(list(problems(found))) == (problem is not None)
