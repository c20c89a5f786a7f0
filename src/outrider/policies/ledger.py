"""What outlives requests in a policy that experiments: costs, average rates, and the accounts that bound its losses.

Two purses, counted in plain rounds (the time of a round that does not draft). Each round pays a small share of its time into
both. *Probes*, rounds played to learn rather than to gain, are paid out of the first, at what they lose against the best
known length. *Speculation* is paid out of the second whenever it turns out slower than plain decoding, and pays gains back;
while it is empty nothing is drafted. A pause is paid for by part of what drafting promises meanwhile: text that was hard for
a while must not end what pays on the whole. That part halves with every pause until the purse is full again, so where
promises are not kept the loss against plain decoding is at most the two shares of the time, plus what the purses hold and
what a few more attempts take.

    balance <- min(balance + share * cost_of_round - loss_of_round, cap)
    loss of a round without a draft, in a pause:  -patience * max(promised gain - 1, 0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

from outrider.policies.costs import CostModel
from outrider.policies.rates import PositionRates, Trust

_SHARED_MEMORY = 200.0
_AVERAGED = 8
MOST_PATIENCE = 0.3
"""Part of a promise that pays for the first pause; more, and a drafter that turned useless is tried too often."""


@final
@dataclass
class Purse:
    """A budget of lost time, in plain rounds."""

    share: float
    balance: float
    cap: float
    """Savings beyond this are dropped: a long good run must not pay for a long bad one."""
    lowest: float = -math.inf
    """Debts beyond this are forgiven: decisions are rare, and what was lost until one was made is lost."""

    @property
    def is_full(self) -> bool:
        return self.balance >= self.cap

    def settle(self, cost: float, loss: float) -> None:
        self.balance = max(min(self.balance + self.share * cost - loss, self.cap), self.lowest)


@final
@dataclass
class Average:
    """A mean that forgets."""

    value: float = 0.0

    def add(self, number: float) -> None:
        self.value += (number - self.value) / _AVERAGED if self.value else number


@final
@dataclass
class Experience:
    """Everything a policy object learnt from all its requests. Fed by one engine at a time, as ``CostModel``."""

    probes: Purse
    losses: Purse
    costs: CostModel = field(default_factory=CostModel)
    accepted: PositionRates = field(default_factory=lambda: PositionRates(_SHARED_MEMORY))
    """Acceptance by position over all requests: what is expected of a new one."""
    found: PositionRates = field(default_factory=lambda: PositionRates(_SHARED_MEMORY))
    """How often the drafter had a guess at a position when it was asked for one."""
    trust: Trust = field(default_factory=lambda: Trust(_SHARED_MEMORY))
    """What the drafter's beliefs are worth."""
    patience: float = MOST_PATIENCE
    """Part of what drafting promises that pays for a pause of it."""
    is_paused: bool = False
    """Drafting would pay, it is thought, but the purse was empty."""
    thinking: Average = field(default_factory=Average)
    """Seconds that a decision takes."""
    padded: bool = True
    """Passes are as wide as their widest row."""
    num_rounds: int = 0
    num_asked: int = 0
    """Rounds for which the drafter was asked."""
    num_probes: int = 0
    turn: int = 0
    """Which kind of probe is next."""
    last_probe: int = 0
    """Round of the last probe."""

    def forget_guesses(self, credit: float) -> None:
        """Know nothing of guesses any more; ``credit`` may be lost before anything is gained. Costs stay."""
        self.accepted, self.found = PositionRates(_SHARED_MEMORY), PositionRates(_SHARED_MEMORY)
        self.trust, self.patience, self.is_paused = Trust(_SHARED_MEMORY), MOST_PATIENCE, False
        self.losses.balance = credit

    def credit(self, forgone: float) -> float:
        """Plain rounds that a plain round is worth in a pause of what promises so much more."""
        return self.patience * forgone if self.is_paused else 0.0

    def pause(self, is_paused: bool) -> None:
        """Note a decision. Pauses wear patience out, success restores it."""
        if is_paused and not self.is_paused:
            self.patience /= 2
        if self.losses.is_full:
            self.patience = MOST_PATIENCE
        self.is_paused = is_paused
