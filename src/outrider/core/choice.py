"""A method by name, checked against the tables before any model is loaded.

``Choice.check`` needs names only: an unknown method, a misspelt option or a missing draft model is found at once, not after
minutes of loading. What depends on the loaded model is checked when the two are composed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from outrider.core.catalog import Catalog
from outrider.core.draft import Draws, Shape
from outrider.core.errors import CompositionError, OptionError, closest
from outrider.core.method import agree_on_draws
from outrider.core.method_rows import ExecutorOptions, MethodRow, PolicyRow, RuleRow, option_names

_RENAMED = {"ends": "target_folder"}
"""Options of earlier versions, and what they are called now."""


def _hint(option: str, valid: Set[str], also: Sequence[str]) -> str:
    """The present name of a renamed option, or the nearest name; then all valid ones."""
    now = _RENAMED.get(option)
    near = f"it is called {now!r} now; " if now in valid else closest(option, [*sorted(valid), *also])
    return f"{near}valid: {', '.join(sorted(valid))}"


def agrees(row: MethodRow, rule: RuleRow) -> bool:
    """Whether a rule is exact for a method's draws and can walk the shape its drafter grows."""
    fits = row.drafter.shape is Shape.CHAIN or rule.rule.shape is Shape.TREE
    return fits and bool(set(rule.rule.exact_for) & set(row.drafter.offers))


@dataclass(frozen=True, eq=False)
class Tables:
    """Methods, acceptance rules and policies by name."""

    methods: Catalog[MethodRow]
    rules: Catalog[RuleRow]
    policies: Catalog[PolicyRow]

    def rows_of(self, name: str, options: Mapping[str, Any] | None = None) -> dict[str, MethodRow]:
        """The row of a method, then the rows of the methods that its options compose it of."""
        row = self.methods[name]
        return {name: row, **{part: self.methods[part] for part in row.part_names(options or {})}}


@dataclass(frozen=True)
class Choice:
    """A method, a rule, a policy and options, as they were asked for."""

    name: str
    acceptance: str | None
    policy: str
    options: Mapping[str, Any]

    def given(self, tables: Tables) -> dict[str, Any]:
        """All options: the method's defaults, overridden by what was asked for."""
        return {**(tables.methods[self.name].defaults or {}), **self.options}

    def rule(self, tables: Tables) -> RuleRow:
        """The named rule, or the method's default rule."""
        return tables.rules[self.acceptance or tables.methods[self.name].acceptance]

    def check(self, tables: Tables, *, num_drafts: int, translates: bool, also: Sequence[str] = ()) -> None:
        """Refuse unknown names, options that no part has, and a method that lacks something it needs. ``also`` lists
        names that the caller handles itself; they are suggested for misspelt options."""
        row, rule_row, given = tables.methods[self.name], self.rule(tables), self.given(tables)
        agree_on_draws(row.drafter, rule_row.rule)
        rows = tables.rows_of(self.name, given)
        own = (part.options for part in rows.values())
        kinds = [tables.policies[self.policy].options, rule_row.options, ExecutorOptions, *own]
        valid = set[str]().union(*map(option_names, kinds))
        for option in self.options:
            if option not in valid:
                hint = _hint(option, valid, also)
                raise OptionError(f"method {self.name!r} with policy {self.policy!r} has no option {option!r}; {hint}")
        lacking = next((need for need in rule_row.needs if need not in given), None)
        if lacking:
            rule = self.acceptance or row.acceptance
            raise CompositionError(f"acceptance rule {rule!r} needs the option {lacking!r}; see docs/{rule}.md")
        _check_needs(self.name, rows, given, num_drafts=num_drafts, translates=translates)


def _check_needs(
    name: str, rows: Mapping[str, MethodRow], given: Mapping[str, Any], *, num_drafts: int, translates: bool
) -> None:
    """Refuse a method if it, or one of its parts, lacks something it needs."""
    named = rows[name].part_names(given)
    for part, row in rows.items():
        if part in named and "heads" in row.needs:
            raise CompositionError(
                f"method {name!r} cannot be made of {part!r}: its heads need the states of all accepted tokens, and a part "
                "sees those of its own guesses; use 'draft-model', 'best-first', 'suffix' or another row that copies"
            )
        if part in named and (row.parts is not None or row.any_tokenizer or Draws.DETERMINISTIC not in row.drafter.offers):
            raise CompositionError(
                f"method {name!r} cannot be made of {part!r}: its guesses must be chosen ones, of the target's own tokens; "
                "use 'draft-model', 'best-first', 'suffix' or another row that copies"
            )
        if row.needs_draft and not num_drafts:
            raise CompositionError(f"method {part!r} needs a draft model; give draft=, or use method 'prompt-lookup'")
        if row.any_tokenizer and not translates:
            raise CompositionError(f"method {part!r} needs the tokenizers of target and draft; use LLM, or give translation=")
        missing = next((need for need in row.needs if need not in given), None)
        if missing:
            raise CompositionError(f"method {part!r} needs the option {missing!r}; see docs/methods/{part}.md")
