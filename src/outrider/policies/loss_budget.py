"""The loss budget: it bounds the time that a policy may lose against plain decoding.

There are two accounts, in units of plain rounds (rounds that do not draft). Each round pays a small share of its time into
both. *Drafting* covers drafts that turn out slower than plain decoding, and receives their gains. A draft is made only if it
covers their worst case. *Probing* covers guesses that are not expected to pay. So the loss is at most the two shares of the
time, plus what the accounts may hold.

A drafter that was replaced wants a chance: both accounts as they were at first. Learning may replace a drafter every few
rounds, and a chance each time would be a loss without bound. So a third account pays for chances. It receives the share of
drafting, and is full at first.
"""

from __future__ import annotations

from typing import final

from outrider.policies.tuning import TUNING


@final
class LossBudget:
    """The accounts of what may still be lost."""

    def __init__(self, loss_share: float, probe_share: float) -> None:
        self._shares = loss_share, probe_share
        self._chance = float(TUNING.run)
        self.forget()

    def takes_chance(self) -> bool:
        """Pay for a chance, if enough was saved."""
        is_paid = self._chance >= TUNING.run
        self._chance -= TUNING.run if is_paid else 0
        return is_paid

    def forget(self) -> None:
        """Reset the accounts of drafting and probing, as if nothing had been lost yet."""
        self.drafting, self.probing = TUNING.run, TUNING.memory * self._shares[1]

    def book(self, cost: float, gain: float, *, is_probe: bool) -> None:
        """Record a round with a draft. It took ``cost`` plain rounds, and saved ``gain`` of them."""
        self._save(cost)
        self._add(self._shares[0] * cost + (0.0 if is_probe else gain), gain if is_probe else 0.0)

    def rest(self) -> None:
        """Record a plain round."""
        self._save(1.0)
        self._add(*self._shares)

    def _save(self, cost: float) -> None:
        self._chance = min(self._chance + self._shares[0] * cost, TUNING.run)

    def _add(self, drafting: float, probing: float) -> None:
        """Limit both accounts, so that a long good stretch cannot pay for a long bad one. Debts beyond half a run are forgiven,
        because compiling kernels for a new kind of round happens only once."""
        self.drafting = max(min(self.drafting + drafting, 3 * TUNING.run), -TUNING.run / 2)
        self.probing = max(min(self.probing + probing, TUNING.run), -TUNING.run / 2)
