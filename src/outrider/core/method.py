"""A method is one choice per stage. Choices that would not be exact together are refused here, before the first token."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.draft import Draws, Shape
from outrider.core.errors import CompositionError
from outrider.core.interfaces import AcceptanceRule, Drafter, Policy


@dataclass(frozen=True, eq=False)
class Method:
    """A drafter, the rule that walks its trees, and the policy that plans them."""

    drafter: Drafter
    """Grows the tree of guesses."""
    rule: AcceptanceRule
    """Decides which guesses are accepted."""
    policy: Policy
    """Decides how much is drafted in each round."""

    def __post_init__(self) -> None:
        rule, drafter = type(self.rule), type(self.drafter)
        if self.drafter.draws not in rule.exact_for:
            raise CompositionError(_refusal(drafter, rule, f"its guesses are {self.drafter.draws.value}"))
        if drafter.shape is Shape.TREE and rule.shape is Shape.CHAIN:
            raise CompositionError(_refusal(drafter, rule, "it grows trees and the rule walks only chains"))

    @property
    def lossless(self) -> bool:
        """Whether the output law is the target's."""
        return type(self.rule).lossless


def agree_on_draws(drafter: type[Drafter], rule: type[AcceptanceRule]) -> Draws:
    """The rule's preferred way of drawing among those the drafter offers."""
    for draws in rule.exact_for:
        if draws in drafter.offers:
            return draws
    offered = " or ".join(draws.value for draws in drafter.offers)
    raise CompositionError(_refusal(drafter, rule, f"its guesses are {offered}"))


def _refusal(drafter: type[Drafter], rule: type[AcceptanceRule], reason: str) -> str:
    exact = " and ".join(draws.value for draws in rule.exact_for)
    return (
        f"drafter {drafter.__name__} cannot be verified by rule {rule.__name__}: {reason}, "
        f"and the rule is exact for {exact} guesses on a {rule.shape.value}; use acceptance='coupled'"
    )
