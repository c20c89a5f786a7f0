"""A run, round by round. Pictures and pages read nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.reason import Reason
from outrider.core.request import Origin


@dataclass(frozen=True)
class Round:
    """One round of one request."""

    request: int
    """Index of the request among those submitted together."""
    position: int
    """Output position the round started from."""
    tokens: list[int]
    """Tokens of the tree's nodes, the root first."""
    parents: list[int]
    path: list[int]
    """Accepted nodes, the root excluded."""
    emitted: list[int]
    """Tokens appended to the output. A stop may cut an accepted run short."""
    origins: list[Origin]
    draft_seconds: float
    score_seconds: float
    seconds: float
    reason: Reason | None = None
    """Why the policy planned this round as it did."""

    def to_json(self) -> dict[str, Any]:
        reason = self.reason.to_json() if self.reason else None
        return {**asdict(self), "origins": [origin.value for origin in self.origins], "reason": reason}
