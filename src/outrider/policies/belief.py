"""What guesses were worth against what was expected of them.

A request has one number of its own: how much likelier its guesses are to pass than is usual over all requests (``rates.py``). A
drafter that says how sure it is is believed as far as guesses have kept what it said. Evidence fades a little each round.

    shift = (passed - expected) / (tested + prior weight)       logit(rate_k) = logit(usual_k) + 4 shift
    trust = passed / expected by the drafter
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

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

    def survival(self, usual: Sequence[float]) -> list[float]:
        """By position, the chance that guesses up to it all pass. Odds are shifted, and so rates near 1/2 the most."""
        odds = math.exp(4 * (self.passed - self.expected) / (self.tested + TUNING.prior_weight))
        return reach_of([rate * odds / (1 - rate + rate * odds) for rate in usual])

    def trust(self, prior: float) -> float:
        """What an expectation has to be multiplied with."""
        return (self.passed + TUNING.prior_weight * prior) / (self.expected + TUNING.prior_weight)

    def rate(self, prior: float) -> float:
        """How likely a guess is to be right where those before it are, its belief not being known yet."""
        return (self.passed + TUNING.prior_weight * prior) / (self.tested + TUNING.prior_weight)


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
