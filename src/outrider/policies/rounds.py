"""A round as the default policy stores it until it has time to learn from it, and what rounds have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from outrider.core.interfaces import Observation, Plan
from outrider.core.prompt_reading import Prompts
from outrider.core.reason import ReasonCode
from outrider.core.tree import TokenTree
from outrider.policies.lengths import depths_of


class Kind(NamedTuple):
    """What rounds that cost the same have in common."""

    num_rows: int
    num_places: int
    """Prompt tokens that the pass had room for."""
    length: int
    """Guesses along the longest path."""
    width: int
    """Guesses of a row in the pass."""
    is_asked: bool
    """Whether the drafter was asked."""
    was_behind: bool
    """Whether the drafter had committed tokens to read before it could draft."""
    is_probe: bool


@final
class SeenRound(NamedTuple):
    """The parts of an observation that are kept: small ones only, so no scores."""

    plan: Plan | None
    tree: TokenTree
    beliefs: Sequence[Sequence[float]] | None
    paths: Sequence[Sequence[int]]
    accepted: Sequence[int]
    draft_seconds: float
    seconds: float
    padded: bool
    prompts: Prompts

    @staticmethod
    def of(seen: Observation) -> SeenRound:
        draft, took = seen.draft, (seen.draft_seconds, seen.seconds, seen.padded)
        return SeenRound(seen.plan, draft.tree, draft.beliefs, seen.paths, seen.num_accepted, *took, seen.prompts)

    def shape(self) -> tuple[Sequence[int], Sequence[int], int, int]:
        """Guesses along a path that were asked for and that were found, by row. Then the longest path, and the guesses of a row
        in the pass. A tree counts as many guesses as were asked for, since their number follows the plan."""
        tree, found, plan = self.tree, depths_of(self.tree), self.plan
        length = max(found)
        width = max(round(sum(found) / len(found)), min(length, 1))
        if not tree.is_chain and sum(tree.sizes) - len(found) != sum(found):
            width = max(plan.max_nodes if plan else found)
        elif self.padded:
            length = width = tree.num_nodes - 1
        return plan.max_depth if plan else found, [length] * len(found) if self.padded else found, length, width


def is_probe(plan: Plan | None) -> bool:
    return plan is not None and plan.reason is not None and plan.reason.code is ReasonCode.PROBE
