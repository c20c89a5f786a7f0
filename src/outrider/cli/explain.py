"""One row of the tables in full: what it does, what it needs, its options with meaning and default, paper and example.

The meaning of an option is the docstring under its field, read from the source, so it is written only once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from outrider.core.choice import agrees
from outrider.core.errors import OptionError, nearest
from outrider.core.method_rows import MethodRow, PolicyRow, RuleRow
from outrider.methods import METHODS, POLICIES, RULES

_WIDTH = 112


@dataclass(frozen=True)
class OptionHelp:
    """One option with its meaning and its default."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Explanation:
    """The output of ``outrider methods NAME``."""

    name: str
    summary: str
    facts: Mapping[str, str]
    options: Mapping[str, list[OptionHelp]]
    """Options, by the part that has them."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        lines = [f"{self.name}: {self.summary}", ""]
        for label, fact in self.facts.items():
            lines += _hanging(f"  {label:<12}", fact)
        for owner, options in self.options.items():
            lines += ["", f"  options {owner}"]
            for option in options:
                lines += _hanging(f"    {option.name} = {option.default}".ljust(30) + "  ", option.meaning)
        return "\n".join(lines)


def explain(name: str) -> Explanation:
    """A method, an acceptance rule or a policy by name."""
    if name in METHODS:
        return _method(name, METHODS[name])
    if name in RULES:
        return _rule(name, RULES[name])
    if name in POLICIES:
        return _policy(name, POLICIES[name])
    raise OptionError(f"unknown method, rule or policy {name!r}; {nearest(name, [*METHODS, *RULES, *POLICIES])}")


def _method(name: str, row: MethodRow) -> Explanation:
    needs = (["a draft model (draft=, --draft)"] if row.needs_draft else []) + [f"the option {need!r}" for need in row.needs]
    others = [key for key, rule in RULES.items() if rule.rule.lossless and key != row.acceptance and agrees(row, rule)]
    facts = {
        "keeps": RULES[row.acceptance].keeps,
        "rule": f"{row.acceptance} (default)" + (f"; lossless too: {', '.join(others)}" if others else ""),
        "policy": f"{row.policy} (default), or fixed where a length is given",
        "needs": ", ".join(needs) or "nothing but the model",
        "paper": row.paper.strip("-") or "-",
        "example": _example(name, row),
        "in Python": _python(name, row),
        "more": f"docs/methods/{name}.md",
    }
    defaults = row.defaults or {}
    policy = POLICIES[row.policy]
    options = {f"of {name}": _options(row.options, defaults), f"of policy {row.policy}": _options(policy.options, defaults)}
    return Explanation(name, row.summary, facts, {owner: many for owner, many in options.items() if many})


def _rule(name: str, row: RuleRow) -> Explanation:
    facts = {
        "keeps": row.keeps,
        "guesses": ", ".join(draws.value for draws in row.rule.exact_for),
        "walks": "any tree" if row.rule.shape.value == "tree" else "chains only",
        "paper": row.paper,
        "example": f'outrider generate "Once upon a time" --temperature 0.8 --acceptance {name}',
    }
    found = _options(row.options, {})
    return Explanation(name, row.summary, facts, {f"of {name}": found} if found else {})


def _policy(name: str, row: PolicyRow) -> Explanation:
    facts = {"example": f'outrider generate "Once upon a time" --policy {name}', "more": "docs/policies.md"}
    return Explanation(name, row.summary, facts, {f"of {name}": _options(row.options, {})})


def _example(name: str, row: MethodRow) -> str:
    needed = "".join(f" -O {need}=FOLDER" for need in row.needs)
    draft = " --draft DRAFT" if row.needs_draft else ""
    return f'outrider generate "Once upon a time" --model MODEL{draft} --method {name}{needed} --show'


def _python(name: str, row: MethodRow) -> str:
    given = ['"MODEL"', f'method="{name}"'] + (['draft="DRAFT"'] if row.needs_draft else [])
    given += [f'{need}="FOLDER"' for need in row.needs]
    return f"LLM({', '.join(given)})"


def _options(kind: type, changed: Mapping[str, Any]) -> list[OptionHelp]:
    meanings = _meanings(kind)
    found: list[OptionHelp] = []
    for item in fields(kind):
        default = changed.get(item.name, item.default)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        found.append(OptionHelp(item.name, shown, meanings.get(item.name, "")))
    return found


def _meanings(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass; empty if the source is not available."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return {}
    (body,) = (node.body for node in source.body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for field, after in pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _hanging(label: str, text: str) -> list[str]:
    """A label, followed by text with a hanging indent."""
    first, *rest = textwrap.wrap(text, max(40, _WIDTH - len(label)), break_long_words=False) or [""]
    return [f"{label}{first}".rstrip(), *(" " * len(label) + line for line in rest)]
