"""Rounds as they are noted, and what is read from them later.

A policy is told about every round, but need not think about every round: on a small model a round takes a millisecond, and a
few dozen lines of Python after each are a percent or two of it. So rounds are noted, which costs next to nothing, and read
together when the next decision is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.interfaces import Observation
from outrider.policies.belief import Asked, Belief
from outrider.policies.chooser import Outlook
from outrider.policies.cost_model import Timing
from outrider.policies.lengths import depths_of
from outrider.policies.tuning import TUNING


class Decision(NamedTuple):
    """What is drafted until the next decision, and why."""

    outlook: Outlook
    best: int
    """The longest of ``lengths``."""
    lengths: tuple[int, ...]
    """One for every row."""
    num_asked: int
    """Rounds that had asked the drafter when it was made."""


class Note(NamedTuple):
    """A round that was not learnt from yet, and what had been decided before it."""

    seen: Observation
    planned: Sequence[int]
    """Guesses along a path that each row was asked for."""
    is_first: bool
    """The drafter was asked for a new request, whose prompt it may have read."""
    decision: Decision | None
    is_probe: bool

    @property
    def found(self) -> list[int]:
        """Guesses along a path that each row got. A captured round has places for all that were asked for, found or not, and
        takes the time of all."""
        tree, depths = self.seen.draft.tree, depths_of(self.seen.draft.tree)
        is_wider = self.seen.padded and tree.is_chain and tree.num_nodes - 1 > max(depths)
        return [tree.num_nodes - 1] * len(depths) if is_wider else depths

    def timing(self, rows: Sequence[Belief]) -> Timing:
        """What the round took."""
        seen, found = self.seen, self.found
        lag = max((row.lag for row, length in zip(rows, self.planned, strict=True) if length), default=0)
        rest, is_reading = seen.seconds - seen.draft_seconds, self.is_first or lag > TUNING.run
        return Timing(max(found), self._width(found), seen.draft_seconds, rest, any(self.planned), is_reading)

    def _width(self, found: Sequence[int]) -> int:
        """Guesses of a row in the pass: those that were found. Where there were others beside the paths, as many as were asked
        for, since their number follows the plan whatever was found."""
        tree = self.seen.draft.tree
        if not tree.is_chain and sum(tree.sizes) - len(found) != sum(found):
            return max(self.seen.plan.max_nodes if self.seen.plan else self.planned)
        return max(found) if self.seen.padded else max(round(sum(found) / len(found)), min(max(found), 1))

    def asked(self) -> list[Asked | None]:
        """What each row was asked for and got; None for a row that was not asked."""
        beliefs, rounds = self.seen.draft.beliefs, zip(self.planned, self.found, self.seen.num_accepted, strict=True)
        return [
            Asked(planned, found, accepted, sum(beliefs[row][: accepted + 1]) if beliefs else 0.0) if planned else None
            for row, (planned, found, accepted) in enumerate(rounds)
        ]

    def cost(self, timing: Timing, usual: float) -> float:
        """Seconds it is booked at. One that is no exception is booked at little more than usual: plain rounds have outliers
        too."""
        is_exception = timing.is_reading or self.is_probe
        return self.seen.seconds if is_exception else min(self.seen.seconds, (1 + TUNING.outlier) * usual)
