"""THE TABLE: every method by name, as one choice per stage.

A row names a drafter; the acceptance rule and the policy have their own short tables, so any row can be run with any rule
that is exact for it. Adding a method is one file under ``drafters/`` (or ``acceptance/``, ``policies/``), one row here and
one page under ``docs/methods/``; the contract tests run over these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from outrider.acceptance import Block, Coupled, Delta, Rejection
from outrider.core.catalog import Catalog
from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, OptionError, nearest
from outrider.core.interfaces import AcceptanceRule, Drafter, Policy, Target
from outrider.core.method import Method, agree_on_draws
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.ngram import PromptLookup, PromptLookupOptions
from outrider.drafters.null import NullDrafter
from outrider.policies.fixed import Fixed, FixedOptions


@dataclass(frozen=True, eq=False)
class Parts:
    """What a row may build its drafter from."""

    target: Target
    draft: Target | None
    draws: Draws
    options: Any


@dataclass(frozen=True)
class NoOptions:
    """Options of a part that has none."""


@dataclass(frozen=True, eq=False)
class MethodRow:
    """One row of the table."""

    summary: str
    paper: str
    drafter: type[Drafter]
    build: Callable[[Parts], Drafter]
    options: type = NoOptions
    defaults: Mapping[str, Any] | None = None
    """Defaults that differ from the policy's own."""
    needs_draft: bool = False
    acceptance: str = "coupled"


@dataclass(frozen=True, eq=False)
class PolicyRow:
    """A policy and its options."""

    build: Callable[[Any], Policy]
    options: type
    summary: str


@dataclass(frozen=True, eq=False)
class RuleRow:
    """An acceptance rule and where it comes from."""

    rule: type[AcceptanceRule]
    summary: str
    paper: str


def _build_draft_model(parts: Parts) -> Drafter:
    assert parts.draft is not None, "compose() checks needs_draft"
    return DraftModel(parts.draft, vocab_size=parts.target.vocab_size, draws=parts.draws)


METHODS: Catalog[MethodRow] = Catalog(
    "method",
    {
        "plain": MethodRow(
            summary="no guesses: one target pass per token",
            paper="-",
            drafter=NullDrafter,
            build=lambda parts: NullDrafter(draws=parts.draws),
        ),
        "draft-model": MethodRow(
            summary="a small model of the same vocabulary guesses a chain",
            paper="Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318)",
            drafter=DraftModel,
            build=_build_draft_model,
            needs_draft=True,
        ),
        "prompt-lookup": MethodRow(
            summary="copies what followed the same words earlier in the text",
            paper="Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding)",
            drafter=PromptLookup,
            build=lambda parts: PromptLookup(parts.options),
            options=PromptLookupOptions,
            defaults={"num_draft_tokens": 8},
        ),
    },
)

RULES: Catalog[RuleRow] = Catalog(
    "acceptance rule",
    {
        "coupled": RuleRow(Coupled, "keep guesses equal to the target's own seeded choice", "docs/lossless.md"),
        "rejection": RuleRow(Rejection, "token-wise rejection sampling", "arXiv 2211.17192, 2302.01318"),
        "block": RuleRow(Block, "rejection sampling of the whole block", "Sun et al. 2024 (arXiv 2403.10444)"),
        "delta": RuleRow(Delta, "each guess accepted with its own probability under the target", "docs/lossless.md"),
    },
)

POLICIES: Catalog[PolicyRow] = Catalog("policy", {"fixed": PolicyRow(Fixed, FixedOptions, "the same length every round")})


def compose(
    name: str,
    target: Target,
    *,
    draft: Target | None = None,
    acceptance: str | None = None,
    policy: str = "fixed",
    options: Mapping[str, Any] | None = None,
) -> Method:
    """A method ready to run. Everything that does not fit is refused here, with both sides named."""
    row, policy_row = METHODS[name], POLICIES[policy]
    rule = RULES[acceptance or row.acceptance].rule
    draws = agree_on_draws(row.drafter, rule)
    if row.needs_draft and draft is None:
        raise CompositionError(f"method {name!r} needs a draft model; give draft=, or use method 'prompt-lookup'")
    given = {**(row.defaults or {}), **(options or {})}
    valid = _names(row.options) | _names(policy_row.options)
    for option in given:
        if option not in valid:
            raise OptionError(f"method {name!r} with policy {policy!r} has no option {option!r}; {nearest(option, valid)}")
    drafter = row.build(Parts(target, draft, draws, _fill(row.options, given)))
    return Method(drafter, rule(), policy_row.build(_fill(policy_row.options, given)))


def _names(options: type) -> set[str]:
    return {item.name for item in fields(options)}


def _fill(options: type, given: Mapping[str, Any]) -> Any:
    return options(**{name: value for name, value in given.items() if name in _names(options)})
