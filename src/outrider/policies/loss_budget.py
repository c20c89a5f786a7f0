"""The loss budget: it bounds the time that a policy may lose against plain decoding.

There are two accounts, in units of plain rounds (rounds that do not draft). Each round pays a small share of its time into
both. *Drafting* covers drafts that turn out slower than plain decoding, and receives their gains. A draft is made only if it
covers their worst case. *Probing* covers guesses that are not expected to pay. So the loss is at most the two shares of the
time, plus what the accounts may hold.
"""

from __future__ import annotations

from typing import final

from outrider.policies.tuning import TUNING


@final
class LossBudget:
    """The accounts of what may still be lost."""

    def __init__(self, loss_share: float, probe_share: float) -> None:
        self._loss_share, self._probe_share = loss_share, probe_share
        self.drafting, self.probing = float(TUNING.run), TUNING.memory * probe_share

    def book(self, cost: float, gain: float = 0.0, *, is_probe: bool = False) -> None:
        """Record a round that took ``cost`` plain rounds and saved ``gain`` of them. No account grows without bound, so a long
        good stretch cannot pay for a long bad one. Large debts are forgiven, since a kernel is compiled only once."""
        drafting = self.drafting + self._loss_share * cost + (0.0 if is_probe else gain)
        probing = self.probing + self._probe_share * cost + (gain if is_probe else 0.0)
        self.drafting = max(min(drafting, 3 * TUNING.run), -TUNING.run / 2)
        self.probing = max(min(probing, TUNING.run), -TUNING.run / 2)
