"""When drafting ends before the plan does: by a rule that is asked after every guess, or by how sure the drafter is.

Either decides about the *next* guess; one that was drawn is kept (Lemma C of docs/lossless.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.sampling import Law


class StopRule(ABC):
    """A drafter asks it at every depth which rows continue. A drafter that cannot ask drafts the whole plan.

    It is made for one round, so it may keep what it saw. It decides about the *next* guess; a guess once drawn is
    kept (Lemma C of docs/lossless.md). None means every row, and avoids waiting for the device.
    """

    @abstractmethod
    def before(self, depth: int, law: Law) -> Sequence[bool] | None:
        """Rows that may draw their guess number ``depth`` (from 0) from ``law`` [B, 1, V]."""

    @abstractmethod
    def after(self, depth: int, law: Law, guesses: Tensor) -> Sequence[bool] | None:
        """Rows that continue below the ``guesses`` [B] just drawn from ``law``. May include rows that have already
        ended."""


@dataclass(frozen=True)
class Doubt:
    """Ends drafts that are no longer worth their cost. A path's *hope* is the probability that all its guesses are accepted.
    Each guess counts with the drafter's confidence times the row's ``trust`` in it. For guesses that are chosen, not sampled.

        drafting ends before a guess  if  sum of the hopes of rows that could go on  <  its level + its place * their number
        a row ends before a guess     if  its hope with it  <  its place

    Prices belong to the number of a guess in its row, because the cost of a pass rises in steps. The last price holds for all
    later guesses.
    """

    levels: tuple[float, ...]
    """Expected tokens lost while this guess is drafted for every row. The first guess is always drafted."""
    places: tuple[float, ...]
    """Expected tokens lost to the guess's node in the target's pass."""
    trust: tuple[float, ...]

    def prices(self, count: int) -> tuple[list[float], list[float]]:
        """Levels and places of the first ``count`` guesses."""
        levels, places = ([*given[:count], *given[-1:] * (count - len(given))] for given in (self.levels, self.places))
        return levels, places

    def lengths(self, beliefs: Sequence[Sequence[float]]) -> list[int]:
        """How many of its guesses each row keeps, given the drafter's confidence ``beliefs[b]`` in each."""
        found, hopes, longest = [0] * len(beliefs), [1.0] * len(beliefs), max(map(len, beliefs), default=0)
        levels, places = self.prices(longest + 1)
        for step in range(longest):
            rows = [row for row, length in enumerate(found) if length == step < len(beliefs[row])]
            for row in rows:
                hopes[row] *= min(1.0, self.trust[row] * beliefs[row][step])
                found[row] += hopes[row] >= places[step]
            able = [hopes[row] for row in rows if found[row] == step + 1 < len(beliefs[row])]
            if sum(able) < levels[step + 1] + places[step + 1] * len(able):
                break
        return found
