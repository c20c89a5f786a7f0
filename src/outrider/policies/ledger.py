"""What outlives requests in a policy that experiments: costs, average rates, and the accounts that bound its losses.

Two purses, counted in plain rounds (the time of a round that does not draft). Each round pays a small share of its time into
both. *Probes*, rounds played to learn rather than to gain, are paid out of the first, at what they lose against the best
known length. *Speculation* is paid out of the second whenever it turns out slower than plain decoding, and pays gains back;
while it is empty nothing is drafted. Whatever the drafter and however wrong the estimates, the loss against plain decoding
is then at most the two shares of the time, plus what the purses hold at the start.

    balance <- min(balance + share * cost_of_round - loss_of_round, cap)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from outrider.policies.costs import CostModel
from outrider.policies.rates import PositionRates, Trust

_SHARED_MEMORY = 200.0
_AVERAGED = 8


@final
@dataclass
class Purse:
    """A budget of lost time, in plain rounds."""

    share: float
    balance: float
    cap: float
    """Savings beyond this are dropped: a long good run must not pay for a long bad one."""

    @property
    def is_full(self) -> bool:
        return self.balance >= self.cap

    def settle(self, cost: float, loss: float) -> None:
        self.balance = min(self.balance + self.share * cost - loss, self.cap)


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
