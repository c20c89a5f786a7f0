"""How much to draft: all nodes of all requests compete for places in one pass.

Nodes are ranked by the chance that their whole path survives. The prefix of that ranking with the most expected tokens per
second is drafted and verified, the empty prefix (plain decoding) included. Where the pass pads, and where rows are trees, a
whole level of all rows is one entry of the ranking; elsewhere every row gets its own draft length.

    tokens(prefix)  = rows + sum of the survival of its nodes, at most what the prompts that a round reads can feed
    seconds(prefix) = drafting to its deepest level + a pass with places for the nodes that are found

A drafter that knows its own confidence stops its drafts by the same rule (``Doubt``). One more guess must be likely to bring
more tokens than the batch emits in that time anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from outrider.core.interfaces import Doubt
from outrider.core.reason import Reason, ReasonCode
from outrider.policies.tuning import TUNING


@final
@dataclass
class RoundForecast:
    """Expected tokens and seconds of a round, for every depth of a draft, at pace 1."""

    tokens: np.ndarray
    seconds: np.ndarray
    drafting: np.ndarray
    rests: np.ndarray
    """Seconds of the drafter and of the rest of the round, by the number of guesses along the longest path."""
    most: float = math.inf
    """Most answer tokens that the prompts read in a round can supply."""
    shares: dict[int, np.ndarray] = field(default_factory=dict)
    """Draft length of every row, for each depth, where rows have different lengths."""

    def __post_init__(self) -> None:
        self._appraise()

    def _appraise(self) -> None:
        self.gains = self.tokens / self.seconds * (self.seconds[0] / self.tokens[0])
        """Expected speed of each depth, in units of plain decoding."""
        self.risks = self.seconds / self.seconds[0] - 1
        """Plain rounds lost if no guess is accepted."""
        self.promising = int(self.gains[1:].argmax()) + 1
        """The fastest depth of those with a guess."""

    def best(self, purse: float, optimism: np.ndarray, *, ends_itself: bool) -> tuple[float, int]:
        """The expected speed of the best depth, and that depth. The loss budget (``purse``) must cover its worst case, in which
        nothing is accepted, and its promised gain must outweigh that risk. ``optimism`` is the share of its estimated cost that
        each depth may really have. Where the drafter stops itself, the deepest of about equally fast depths is taken, since
        guesses that do not pay will not be drafted."""
        gains = self.gains / optimism
        payable = np.where((self.risks <= purse) & (gains - 1 >= TUNING.margin * self.risks), gains, 0.0)
        payable[0] = gains[0]
        best = int(payable.argmax())
        if best and ends_itself:
            best = int(np.flatnonzero(payable >= (1 - TUNING.margin) * payable[best])[-1])
        return float(payable[best]), best

    def lengths(self, depth: int, num_rows: int) -> Sequence[int]:
        """The draft length of every row."""
        return self.shares[depth].tolist() if depth in self.shares else (depth,) * num_rows

    def rank(self, survival: np.ndarray, found: np.ndarray) -> None:
        """Give every row its own draft length. One level more is drafted once for all rows, so each depth has its own ranking,
        and only depths near the best common length are tried. Space in the pass is only paid for where the drafter finds a
        guess, so nodes are ranked by the acceptance of guesses that were found, after their parents."""
        num_rows, longest = survival.shape
        chances = np.minimum.accumulate(survival / np.maximum(found, 1e-9), axis=1)
        rows, levels = np.divmod(np.argsort(-chances, axis=None, kind="stable"), longest)
        for depth in range(max(self.promising - 2, 1), min(self.promising + 4, longest + 1)):
            row, at = rows[levels < depth], levels[levels < depth]
            tokens = np.minimum(num_rows + survival[row, at].cumsum(), self.most)
            seconds = self.drafting[depth] + np.interp(found[at].cumsum() / num_rows, range(longest + 1), self.rests)
            best = int((tokens / seconds).argmax())
            self.tokens[depth], self.seconds[depth] = tokens[best], seconds[best]
            self.shares[depth] = np.bincount(row[: best + 1], minlength=num_rows)
        self._appraise()

    def doubt(self, trust: float, num_rows: int, *, longest: int, further: float, padded: bool) -> Doubt:
        """Tokens that each of ``longest`` guesses must be expected to bring: as many as the batch emits in that time anyway.
        Where rows are padded, space is saved for all rows or for none. A later guess is right with probability ``further`` if
        those before it are, so the bar is higher by that much."""
        rate = self.gains.max() * self.tokens[0] / self.seconds[0]
        guesses, places = (rate * slopes(curve[: longest + 1]) for curve in (self.drafting, self.rests))
        own = np.zeros(longest) if padded else np.minimum(places / num_rows, TUNING.dearest)
        most = num_rows * (TUNING.dearest - own)
        levels = np.minimum((guesses + places * padded) / further, most) if further > 0 else most
        return Doubt(tuple(levels.tolist()), tuple(own.tolist()), (trust,) * num_rows)

    def reason(self, length: int, budget: float) -> Reason:
        """Why ``length`` was chosen, with the expected speed. Without a draft, the expected speed of the best one."""
        best = length or self.promising
        none = ReasonCode.BUDGET if self.gains[best] > 1 else ReasonCode.PLAIN_IS_FASTER
        none = ReasonCode.PROMPTS if self.tokens[best] >= self.most else none
        numbers = {"gain": self.gains[best], "tokens": self.tokens[best] / self.tokens[0], "cost": 1 + self.risks[best]}
        numbers = {name: float(number) for name, number in numbers.items()} | {"length": best, "budget": budget}
        return Reason(ReasonCode.FASTEST if length else none, numbers)


def look_ahead(
    survival: np.ndarray, found: np.ndarray, drafting: np.ndarray, rests: np.ndarray, *, padded: bool, most: float
) -> RoundForecast:
    """Forecast rounds by length, from the probability by row and position that all guesses up to it are accepted. ``drafting``
    and ``rests`` are seconds of the two parts of a round. A drafter that copies may find fewer guesses than it was asked for:
    ``found[k]`` is the chance of more than k. So the cost of a round is the mean over the lengths found. It is not the cost of
    the mean length, because pass costs rise in steps."""
    num_rows = len(survival)
    is_shared = padded or num_rows == 1  # where rows are padded, a place is there for all of them or for none
    somebody = found if is_shared else 1 - (1 - found) ** num_rows
    tokens, seconds = np.full(len(rests), float(num_rows)), np.full(len(rests), rests[0])
    tokens[1:] += survival.sum(0).cumsum()
    seconds[1:] += drafting[0] + (somebody * np.diff(drafting) + found * np.diff(rests)).cumsum()
    return RoundForecast(np.minimum(tokens, most), seconds, drafting, rests, most)


def slopes(curve: np.ndarray) -> np.ndarray:
    """For each place, the cost per further place up to the cheapest later one. Pass costs rise in steps, and whoever pays for a
    step gets every place up to the next step."""
    places = np.arange(len(curve))
    steps = places[None, :] - places[:-1, None]
    rises = np.where(steps > 0, (curve[None, :] - curve[:-1, None]) / np.maximum(steps, 1), np.inf)
    return np.maximum(rises.min(1, initial=np.inf), 0.0)
