"""Rows of the tables: how a part is built, what it needs, and which options it has.

The tables themselves are in ``methods.py``. A row may be made of other rows (a hybrid of drafters, a cascade). It then says
which of its options names them, and its builder asks ``Parts.part`` for their drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol, cast

from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule, Drafter, Policy, Target
from outrider.core.translation import Translation


class PartBuilder(Protocol):
    """Builds the drafter of another row from the same models and options."""

    def __call__(self, name: str, *, skip_drafts: int = 0) -> Drafter: ...


@dataclass(frozen=True, eq=False)
class Parts:
    """What a row may build its drafter from."""

    target: Target
    draft: Target | None
    draws: Draws
    options: Any
    drafts: tuple[Target, ...] = ()
    """All draft models, ``draft`` first."""
    translation: Translation | None = None
    """The translation between the tokenizers of target and draft, for ``any_tokenizer`` rows."""
    part: PartBuilder | None = None
    """Builds the drafters of other rows; None for a drafter that is itself part of another."""

    @property
    def draft_model(self) -> Target:
        """The first draft model, for a row that needs one."""
        assert self.draft is not None, "compose() checks needs_draft"
        return self.draft

    @property
    def tokenizers(self) -> Translation:
        """The translation between the two tokenizers, for an ``any_tokenizer`` row."""
        assert self.translation is not None, "compose() checks any_tokenizer rows"
        return self.translation

    def drafter_of(self, name: str, *, skip_drafts: int = 0) -> Drafter:
        """The drafter of another row, built from the same options and models. The first ``skip_drafts`` draft models
        are left out."""
        assert self.part is not None, "compose() hands the builder on"
        return self.part(name, skip_drafts=skip_drafts)


@dataclass(frozen=True)
class NoOptions:
    """Options of a part that has none."""


@dataclass(frozen=True)
class ExecutorOptions:
    """Options for the way in which rounds are run, for methods that allow them."""

    beside: bool = False
    """Draft the next round while the target checks this one. For rows with a draft model, best with ``draft_process``."""


@dataclass(frozen=True, eq=False)
class MethodRow:
    """One row of the table."""

    summary: str
    """One line that describes the method."""
    paper: str
    """Where the idea comes from."""
    drafter: type[Drafter]
    """The class of the drafter."""
    build: Callable[[Parts], Drafter]
    """Makes the drafter from the loaded models and options."""
    options: type = NoOptions
    """A dataclass of the options that the method takes."""
    defaults: Mapping[str, Any] | None = None
    """Default options that differ from the policy's own defaults."""
    needs_draft: bool = False
    """A draft model has to be given."""
    needs_layers: bool = False
    """Whether it runs single layers (``LayeredTarget``): the draft model's if the row needs one, else the target's."""
    needs: tuple[str, ...] = ()
    """Options that must be given."""
    texts: tuple[str, ...] = ()
    """Options that are lists of texts. ``LLM`` takes strings and passes on their tokens."""
    acceptance: str = "coupled"
    """The rule that is taken when none is asked for."""
    policy: str = "adaptive"
    """The policy to use when the user names neither a policy nor a draft length."""
    parts: str | None = None
    """The option that names the rows this one is made of. Their options become options of this row."""
    any_tokenizer: bool = False
    """Whether the draft model may have another tokenizer than the target."""

    def part_names(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the rows that this row is composed of, given its options."""
        if self.parts is None:
            return ()
        default = next(item.default for item in fields(self.options) if item.name == self.parts)
        assert default is not MISSING, "an option that names rows has a default"
        return names_in(given.get(self.parts, default))


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
    options: type = NoOptions
    needs: tuple[str, ...] = ()
    """Options that must be given, such as the folder of a trained head."""

    @property
    def keeps(self) -> str:
        """The property of plain decoding's text that this rule keeps, in words."""
        if self.rule.keeps_seed:
            return "the seed: the text of plain decoding with the same seed, token for token"
        return (
            "the law: texts as likely as plain decoding's, but not the same ones"
            if self.rule.lossless
            else "neither seed nor law"
        )

    def build(self, given: Mapping[str, Any]) -> AcceptanceRule:
        """Build the rule with its options."""
        make = cast("Callable[..., AcceptanceRule]", self.rule)
        return make() if self.options is NoOptions else make(fill(self.options, given))


def names_in(value: Any) -> tuple[str, ...]:
    """Names given as a sequence, or in one string with commas between them."""
    names = value.split(",") if isinstance(value, str) else value
    return tuple(str(name).strip() for name in names if str(name).strip())


def option_names(options: type) -> set[str]:
    return {item.name for item in fields(options)}


def fill(options: type, given: Mapping[str, Any]) -> Any:
    """Fill a part's options from all options that were given."""
    return options(**{name: value for name, value in given.items() if name in option_names(options)})
