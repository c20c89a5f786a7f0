"""What the default policy keeps of a round until it has time to learn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.interfaces import Observation
from outrider.core.prompt_reading import Prompts
from outrider.core.reason import ReasonCode


class CostKind(NamedTuple):
    """What rounds that cost the same have in common. Counts are of guesses of a row: along its path, and in the pass."""

    num_rows: int
    num_prompt_places: int
    length: int
    width: int
    is_asked: bool
    was_behind: bool
    """Whether the drafter had committed tokens to read before it could draft."""
    is_probe: bool


class Lesson(NamedTuple):
    """One round: how many guesses along a path were asked for, found and accepted in each row, and what it cost."""

    kind: CostKind
    spread: float
    """Guesses at each level of its trees."""
    asked: Sequence[int]
    found: Sequence[int]
    accepted: Sequence[int]
    beliefs: Sequence[Sequence[float]] | None
    num_tokens: int
    num_live: int
    """Rows that have a request."""
    prompts: Prompts
    seconds: float
    draft_seconds: float
    padded: bool

    @staticmethod
    def of(seen: Observation, spread: float, *, was_behind: bool) -> Lesson:
        """The lesson of a round. A tree counts as many guesses as were asked for, since their number follows the plan."""
        tree, plan = seen.draft.tree, seen.plan
        found = tree.heights
        length, count = max(found), len(found)
        width = max(round(sum(found) / count), min(length, 1))
        if not tree.is_chain and sum(tree.sizes) - count != sum(found):
            width = max(plan.max_nodes if plan else found)
        elif seen.padded:
            length = width = tree.num_nodes - 1
            found = [length] * count
        asked = plan.max_depth if plan else found
        is_probe = plan is not None and plan.reason is not None and plan.reason.code is ReasonCode.PROBE
        kind = CostKind(count, seen.prompts.num_places, length, width, any(asked), was_behind, is_probe)
        num_tokens, num_live = sum(map(len, seen.paths)), sum(map(bool, seen.paths))
        return Lesson(
            kind, spread, asked, found, seen.num_accepted, seen.draft.beliefs, num_tokens, num_live,
            seen.prompts, seen.seconds, seen.draft_seconds, seen.padded,
        )  # fmt: skip
