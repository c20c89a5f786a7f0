"""The loss budget: it bounds the time that a policy may lose against plain decoding.

There are two accounts, in units of plain rounds (rounds that do not draft). Each round pays a small share of its time into
both. The *drafting* account covers drafts that turn out slower than plain decoding, and receives their gains. A draft is made
only if this account covers its worst case. The *probe* account covers guesses that are not expected to pay. So the loss is at
most the two shares of the time, plus what the accounts may hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from outrider.policies.tuning import TUNING


@final
@dataclass
class LossBudget:
    """The accounts of what may still be lost."""

    loss_share: float
    probe_share: float
    drafting: float = field(init=False)
    probing: float = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the accounts, as if nothing had been lost yet."""
        self.drafting, self.probing = TUNING.run, TUNING.memory * self.probe_share

    def book(self, cost: float, tokens: float, *, is_probe: bool) -> None:
        """Record a round with a draft. It took ``cost`` plain rounds and emitted ``tokens`` for every row."""
        lost = cost - tokens
        self._settle(self.loss_share * cost - (0.0 if is_probe else lost), -lost if is_probe else 0.0)

    def rest(self) -> None:
        """Record a plain round."""
        self._settle(self.loss_share, self.probe_share)

    def _settle(self, drafting: float, probing: float) -> None:
        """Limit both accounts. Savings beyond three learning runs are dropped, so that a long good stretch cannot pay for a
        long bad one. Debts beyond half a run are forgiven, because compiling kernels for a new kind of round happens only
        once."""
        self.drafting = max(min(self.drafting + drafting, 3 * TUNING.run), -TUNING.run / 2)
        self.probing = max(min(self.probing + probing, TUNING.run), -TUNING.run / 2)
