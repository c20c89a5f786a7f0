"""A plan: how much to draft in the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.reason import Reason
from outrider.core.stopping import Doubt, StopRule


@dataclass(frozen=True, eq=False)
class Plan:
    """How much to draft next: the most guesses along one path, and in all, for each row."""

    max_depth: tuple[int, ...]
    max_nodes: tuple[int, ...]
    stop: StopRule | None = None
    """Asked while drafting; may end a row's path earlier."""
    doubt: Doubt | None = None
    """For drafters that know what they believe at no cost; others draft the whole plan."""
    reason: Reason | None = None
    """Why the policy planned this."""

    def clipped(self, room: Sequence[int]) -> Plan:
        """The same with no path longer than ``room[b]``."""
        depth = tuple(min(d, r) for d, r in zip(self.max_depth, room, strict=True))
        nodes = tuple(n if d else 0 for n, d in zip(self.max_nodes, depth, strict=True))
        return Plan(depth, nodes, self.stop, self.doubt, self.reason)
