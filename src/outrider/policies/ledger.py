"""The accounts that bound what a policy may lose against plain decoding.

Two purses, counted in plain rounds (the time of a round that does not draft). Each round pays a small share of its time into
both. *Probes*, rounds played to learn rather than to gain, are paid out of the first, at what they lose against the best
known length. *Speculation* is paid out of the second whenever it turns out slower than plain decoding, and pays gains back;
drafting pauses while it is empty. Part of what drafting promises meanwhile pays for the pause, half as much after every pause
until losses are recovered. So the loss is at most the two shares of the time, plus what the purses hold.

    balance <- min(balance + share * cost_of_round - loss_of_round, cap)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from outrider.policies.tuning import TUNING


@final
@dataclass
class Purse:
    """A budget of lost time, in plain rounds."""

    share: float
    balance: float
    cap: float
    """Savings beyond this are dropped: a long good run must not pay for a long bad one."""
    lowest: float
    """Debts beyond this are forgiven: what was compiled for a round is compiled once."""

    @property
    def is_full(self) -> bool:
        return self.balance >= self.cap

    def settle(self, cost: float, loss: float) -> None:
        self.balance = max(min(self.balance + self.share * cost - loss, self.cap), self.lowest)


@final
@dataclass
class Ledger:
    """What was lost and what may be."""

    probe_share: float
    loss_share: float
    probes: Purse = field(init=False)
    losses: Purse = field(init=False)
    patience: float = TUNING.patience
    is_paused: bool = False
    """Drafting would pay, it is thought, but the purse was empty."""

    def __post_init__(self) -> None:
        self.probes = Purse(self.probe_share, 0.0, cap=2.0, lowest=-3 * TUNING.credit)
        self.forget()

    def forget(self) -> None:
        """Nothing was lost yet, as far as is known."""
        credit = TUNING.credit
        self.losses = Purse(self.loss_share, credit, cap=3 * credit, lowest=-credit / 2)
        self.patience, self.is_paused = TUNING.patience, False

    @property
    def payable(self) -> float:
        """Plain rounds that a draft may lose. After a pause there must be some, or the first failed guesses begin another."""
        return self.losses.balance - (TUNING.credit / 2 if self.is_paused else 0.0)

    def book(self, cost: float, tokens: float, *, gain: float, is_probe: bool) -> None:
        """A round that asked the drafter took ``cost`` plain rounds and brought ``tokens`` for every row; ``gain`` was the best
        speed known."""
        self.probes.settle(cost, cost - tokens / gain if is_probe else 0.0)
        self.losses.settle(cost, 0.0 if is_probe else cost - tokens)

    def rest(self, num_rounds: int, forgone: float) -> None:
        """So many plain rounds; drafting promised ``forgone`` tokens more in each."""
        self.probes.settle(num_rounds, 0.0)
        self.losses.settle(num_rounds, -num_rounds * self.patience * forgone if self.is_paused else 0.0)

    def pause(self, is_paused: bool) -> None:
        """Note a decision. Pauses wear patience out, success restores it."""
        if is_paused and not self.is_paused:
            self.patience /= 2
        if self.losses.is_full:
            self.patience = TUNING.patience
        self.is_paused = is_paused
