"""What the default policy keeps of a round until it has time to learn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.interfaces import Observation
from outrider.core.prompt_reading import Prompts
from outrider.core.reason import ReasonCode


class KeptRound(NamedTuple):
    """One round: its guesses along a path of each row, and what it cost."""

    asked: Sequence[int]
    found: Sequence[int]
    accepted: Sequence[int]
    beliefs: Sequence[Sequence[float]] | None
    spread: float
    """Guesses at each level of its trees."""
    length: int
    width: int
    """Guesses along the longest path, and guesses of a row in the pass."""
    num_tokens: int
    num_live: int
    """Tokens that it emitted, and rows that have a request."""
    prompts: Prompts
    seconds: float
    draft_seconds: float
    padded: bool
    was_behind: bool
    """Whether the drafter had committed tokens to read before it could draft."""
    is_probe: bool

    @property
    def is_asked(self) -> bool:
        return any(self.asked)


def kept(seen: Observation, spread: float, *, was_behind: bool) -> KeptRound:
    """The round without its large parts. A tree counts as many guesses as were asked for: their number follows the plan."""
    tree, plan = seen.draft.tree, seen.plan
    found = tree.heights
    length, count = max(found), len(found)
    width = max(round(sum(found) / count), min(length, 1))
    if not tree.is_chain and sum(tree.sizes) - count != sum(found):
        width = max(plan.max_nodes if plan else found)
    elif seen.padded:
        length = width = tree.num_nodes - 1
        found = [length] * count
    return KeptRound(
        plan.max_depth if plan else found, found, seen.num_accepted, seen.draft.beliefs, spread, length, width,
        sum(map(len, seen.paths)), sum(map(bool, seen.paths)), seen.prompts, seen.seconds, seen.draft_seconds, seen.padded,
        was_behind, plan is not None and plan.reason is not None and plan.reason.code is ReasonCode.PROBE,
    )  # fmt: skip
