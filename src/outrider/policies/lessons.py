"""Rounds that were played and not yet learnt from.

A policy is told about every round, but need not think about every round: on a small model a round takes a millisecond, and a
few dozen lines of Python after each are a percent or two of it. So rounds are noted, which costs next to nothing, and read
together when the next decision is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from outrider.core.draft import Draft
from outrider.policies.costs import SLOWEST, Timing
from outrider.policies.ledger import Experience
from outrider.policies.lengths import depths_of
from outrider.policies.outlook import Outlook
from outrider.policies.rates import Outcome, PositionRates, Trust


@final
@dataclass
class Row:
    """What is known of one request."""

    accepted: PositionRates
    """How often a further guess was found and accepted where it was asked for."""
    found: PositionRates
    """How often it was found."""
    trust: Trust
    lag: int = 0
    """Tokens emitted since the drafter was last asked for this row."""
    num_unfaded: int = 0
    """Of these rounds, those that the rates have not forgotten yet."""

    def copy(self) -> Row:
        return Row(self.accepted.copy(), self.found.copy(), self.trust.copy(), self.lag, self.num_unfaded)

    def rest(self, num_rounds: int) -> None:
        """So many rounds without the drafter."""
        self.lag += num_rounds
        self.num_unfaded += num_rounds

    def fade(self) -> None:
        """What was seen counts less the longer it is ago."""
        if self.num_unfaded:
            self.accepted.fade(self.num_unfaded)
            self.found.fade(self.num_unfaded)
            self.trust.fade(self.num_unfaded)
            self.num_unfaded = 0

    def learn(self, asked: Sequence[_Asked], known: Experience) -> None:
        """From rounds that asked the drafter."""
        self.fade()
        if known.found.means or any(one.found < one.planned for one in asked):  # most drafters always find: no news
            outcomes: list[Outcome] = [(one.found, one.found < one.planned) for one in asked]
            self.found.record(*outcomes)
            known.found.record(*outcomes)
        outcomes = [(one.accepted, one.accepted < one.planned) for one in asked]
        expected = sum(one.expected for one in asked)
        accepted = sum(one.accepted for one in asked if one.expected)
        tested = sum(min(one.accepted + 1, one.found) for one in asked if one.expected)
        for rates, trust in ((self.accepted, self.trust), (known.accepted, known.trust)):
            rates.record(*outcomes)
            trust.record(accepted, expected, tested=tested, num_rounds=len(asked))


class _Asked(NamedTuple):
    """Guesses of a row in a round."""

    planned: int
    found: int
    accepted: int
    expected: float
    """Of those that were tested, by the drafter's beliefs; 0 where it has none."""


class Played(NamedTuple):
    """A round as it was noted: what happened, and what had been expected."""

    draft: Draft
    planned: Sequence[int]
    """Guesses each row was asked for."""
    num_accepted: Sequence[int]
    draft_seconds: float
    seconds: float
    padded: bool
    is_first: bool
    """The drafter was asked for a new request."""
    outlook: Outlook | None
    best: int
    """The length that was best then."""
    is_probe: bool


def learn(rows: Sequence[Row], rounds: Sequence[Played], known: Experience) -> None:
    """Read rounds of one batch, oldest first."""
    costs = known.costs.of(len(rows))
    asked: list[list[_Asked]] = [[] for _ in rows]
    timings: list[Timing] = []
    for played in rounds:
        drafted, beliefs = _lengths(played), played.draft.beliefs
        lag = max((row.lag for row, length in zip(rows, played.planned, strict=True) if length), default=0)
        rest = played.seconds - played.draft_seconds
        mean_length = None if played.padded else sum(drafted) / len(drafted)
        timings.append(Timing(max(drafted), played.draft_seconds, rest, any(played.planned), lag, played.is_first, mean_length))
        for i, (row, planned, found, accepted) in enumerate(
            zip(rows, played.planned, drafted, played.num_accepted, strict=True)
        ):
            if planned:
                row.lag = 0
                asked[i].append(_Asked(planned, found, accepted, sum(beliefs[i][: accepted + 1]) if beliefs else 0.0))
            else:
                row.rest(1)
    paces = costs.record(*timings)
    for row, notes in zip(rows, asked, strict=True):
        if notes:
            row.learn(notes, known)
    for played, timing, pace in zip(rounds, timings, paces, strict=True):
        if played.outlook is not None:
            seconds = played.seconds / (pace * costs.plain_excess)
            _settle(played, played.outlook, timing, seconds, known)


def _lengths(played: Played) -> Sequence[int]:
    """Guesses of each row, by which its round is priced: those along a path, or as many as were asked for where the pass had
    others too, since their number follows the plan whatever was found."""
    tree = played.draft.tree
    depths = depths_of(tree)
    return depths if tree.is_chain or sum(tree.sizes) - len(depths) == sum(depths) else played.planned


def _settle(played: Played, outlook: Outlook, timing: Timing, seconds: float, known: Experience) -> None:
    """Book a round at what it took, ``seconds`` at pace 1, in plain rounds as they are on average. One that is no exception is
    booked at no more than a few times what is usual: such outliers happen to plain rounds too."""
    cost, loss = 1.0, 0.0
    tokens, gain = sum(played.num_accepted) / len(played.num_accepted) + 1, outlook.gain(played.best)
    if not timing.asked and not played.best:
        loss = -known.credit(outlook.forgone)
    if timing.asked:
        is_exception = timing.is_reading or played.is_probe
        most = seconds if is_exception else SLOWEST * outlook.usual(timing.length, timing.width)
        cost = min(seconds, most) / outlook.seconds[0]
        if not played.is_probe:
            loss = cost - tokens
    known.probes.settle(cost, cost - tokens / gain if played.is_probe else 0.0)
    known.losses.settle(cost, loss)
