"""What one request has shown of its guesses, against what is usual over all requests (``rates.py``).

A request has one number of its own: how much likelier than usual its guesses are to pass. A drafter that says how sure it is is
believed as far as its guesses have kept what it said. Evidence fades a little each round.

    shift = (passed - expected) / (tested + prior weight)       logit(rate_k) = logit(usual_k) + 4 shift
    trust = passed / expected by the drafter
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from outrider.core.interfaces import Observation
from outrider.policies.lengths import depths_of
from outrider.policies.rates import reach_of
from outrider.policies.tuning import TUNING


@final
@dataclass
class Account:
    """Guesses that were tested, those that were expected to pass, and those that did."""

    horizon: float
    tested: float = 0.0
    expected: float = 0.0
    passed: float = 0.0

    def record(self, tested: float, expected: float, passed: float, *, num_rounds: int = 1) -> None:
        """Learn from a round; with nothing tested, fade by so many."""
        keep = (1 - 1 / self.horizon) ** num_rounds
        self.tested, self.expected = keep * self.tested + tested, keep * self.expected + expected
        self.passed = keep * self.passed + passed

    @property
    def shift(self) -> float:
        """How much likelier than expected a guess is to pass."""
        return (self.passed - self.expected) / (self.tested + TUNING.prior_weight)

    def trust(self, prior: float) -> float:
        """What an expectation has to be multiplied with."""
        return (self.passed + TUNING.prior_weight * prior) / (self.expected + TUNING.prior_weight)

    def rate(self, prior: float) -> float:
        """How likely a guess is to be right where those before it are, its belief not being known yet."""
        return (self.passed + TUNING.prior_weight * prior) / (self.tested + TUNING.prior_weight)


class Asked(NamedTuple):
    """Guesses of a row in a round, and how many of the tested ones the drafter expected to be right (0: it does not say)."""

    planned: int
    found: int
    accepted: int
    believed: float


@final
@dataclass
class Belief:
    """What is known of one request."""

    horizon: float
    accepted: Account = field(init=False)
    trust: Account = field(init=False)

    def __post_init__(self) -> None:
        self.accepted, self.trust = Account(self.horizon), Account(self.horizon)

    def rest(self, num_rounds: int) -> None:
        """So many rounds without the drafter: what was seen counts less."""
        for part in (self.accepted, self.trust):
            part.record(0.0, 0.0, 0.0, num_rounds=num_rounds)

    def learn(self, one: Asked, usual: Sequence[float]) -> None:
        """From a round. ``usual`` has the sums of the usual rates of the first 0, 1, ... positions."""
        tested = min(one.accepted + 1, one.planned)
        self.accepted.record(tested, usual[tested], one.accepted)
        if one.believed:
            self.trust.record(min(one.accepted + 1, one.found), one.believed, one.accepted)

    def survival(self, usual: Sequence[float]) -> list[float]:
        """By position, the chance that guesses up to it are all accepted. Odds are shifted, and so rates near 1/2 the most."""
        odds = math.exp(4 * self.accepted.shift)
        return reach_of([rate * odds / (1 - rate + rate * odds) for rate in usual])

    def copy(self) -> Belief:
        twin = Belief(self.horizon)
        twin.accepted, twin.trust = replace(self.accepted), replace(self.trust)
        return twin


def planned_of(seen: Observation) -> Sequence[int]:
    """Guesses along a path that each row was asked for."""
    return seen.plan.max_depth if seen.plan else depths_of(seen.draft.tree)


def place_of(seen: Observation) -> tuple[int, int]:
    """Guesses along the longest path, and guesses of a row in the pass. Where there were others beside the paths, as many as
    were asked for, since their number follows the plan whatever was found."""
    tree, found = seen.draft.tree, depths_of(seen.draft.tree)
    if not tree.is_chain and sum(tree.sizes) - len(found) != sum(found):
        return max(found), max(seen.plan.max_nodes if seen.plan else found)
    if seen.padded:
        return tree.num_nodes - 1, tree.num_nodes - 1
    return max(found), max(round(sum(found) / len(found)), min(max(found), 1))


def asked_of(seen: Observation, rows: Iterable[int]) -> list[Asked | None]:
    """What rows were asked for and got; None for one that was not asked. Where rows are padded they get the same places."""
    beliefs, planned = seen.draft.beliefs, planned_of(seen)
    found = [place_of(seen)[0]] * len(planned) if seen.padded else depths_of(seen.draft.tree)
    accepted = seen.num_accepted
    believed = {row: sum(beliefs[row][: accepted[row] + 1]) for row in rows} if beliefs else dict[int, float]()
    return [
        Asked(planned[row], min(found[row], planned[row]), accepted[row], believed.get(row, 0.0)) if planned[row] else None
        for row in rows
    ]
