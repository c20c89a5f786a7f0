"""A plan: how much to draft in the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.reason import Reason
from outrider.core.stopping import Doubt, StopRule


@dataclass(frozen=True, eq=False)
class Plan:
    """How much to draft next. For each row: the longest path, and the total number of guesses."""

    max_depth: tuple[int, ...]
    max_nodes: tuple[int, ...]
    stop: StopRule | None = None
    """Asked during drafting; may end a row's path early."""
    doubt: Doubt | None = None
    """Ends drafts by confidence, for drafters that know their confidence at no cost. Others draft the whole plan."""
    reason: Reason | None = None
    """Why the policy planned this."""

    def clipped(self, room: Sequence[int]) -> Plan:
        """The plan with no path longer than ``room[b]``; itself where all fit, as in nearly every round."""
        if min(room) >= max(self.max_depth) and (min(self.max_depth) or not any(self.max_nodes)):
            return self
        depth = tuple(min(d, r) for d, r in zip(self.max_depth, room, strict=True))
        nodes = tuple(n if d else 0 for n, d in zip(self.max_nodes, depth, strict=True))
        return replace(self, max_depth=depth, max_nodes=nodes)
