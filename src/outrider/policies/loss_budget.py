"""The accounts that bound what a policy may lose against plain decoding.

Two purses, counted in plain rounds (the time of a round that does not draft). Each round pays a small share of its time into
them. *Drafting* is paid out of one whenever it turns out slower than plain decoding, and pays gains back; a draft whose worst
case that cannot pay for is not made. *Probes*, guesses that are not expected to pay, come out of the other. So the loss is at
most the two shares of the time, plus what the purses hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from outrider.policies.tuning import TUNING


@final
@dataclass
class LossBudget:
    """What may still be lost."""

    loss_share: float
    probe_share: float
    drafting: float = field(init=False)
    probing: float = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing was lost yet, as far as is known."""
        self.drafting, self.probing = TUNING.run, TUNING.memory * self.probe_share

    def book(self, cost: float, tokens: float, *, is_probe: bool) -> None:
        """A round that asked the drafter took ``cost`` plain rounds and brought ``tokens`` for every row."""
        lost = cost - tokens
        self._settle(self.loss_share * cost - (0.0 if is_probe else lost), -lost if is_probe else 0.0)

    def rest(self) -> None:
        """A plain round."""
        self._settle(self.loss_share, self.probe_share)

    def _settle(self, drafting: float, probing: float) -> None:
        """Savings beyond three runs are dropped: a long good stretch must not pay for a long bad one. Debts beyond half a run
        are forgiven: what was compiled for a round is compiled once."""
        self.drafting = max(min(self.drafting + drafting, 3 * TUNING.run), -TUNING.run / 2)
        self.probing = max(min(self.probing + probing, TUNING.run), -TUNING.run / 2)
