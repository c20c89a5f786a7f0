"""A round as the default policy stores it until it has time to learn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from outrider.core.interfaces import Observation
from outrider.core.prompt_reading import Prompts
from outrider.core.reason import ReasonCode
from outrider.core.tree import TokenTree
from outrider.policies.lengths import depths_of


class PlannedSize(NamedTuple):
    """What was asked of a round."""

    lengths: tuple[int, ...]
    nodes: tuple[int, ...]
    """Guesses along a path and in all, by row."""
    is_probe: bool
    num_places: int
    """Places for prompts in the pass."""


class DraftSize(NamedTuple):
    """How large a draft was."""

    found: Sequence[int]
    """Guesses along a path, by row. Where rows are padded, the longest path of all."""
    length: int
    width: int
    """Guesses along the longest path, and guesses of a row in the pass."""


@final
class SeenRound(NamedTuple):
    """The parts of an observation that are kept: small ones only, so no scores."""

    asked: PlannedSize
    tree: TokenTree
    beliefs: Sequence[Sequence[float]] | None
    accepted: Sequence[int]
    num_rows: int
    """Slots with a request."""
    draft_seconds: float
    seconds: float
    padded: bool
    prompts: Prompts

    @staticmethod
    def of(seen: Observation) -> SeenRound:
        plan, tree, places = seen.plan, seen.draft.tree, seen.prompts.num_places
        if plan is None:
            found = tuple(depths_of(tree))
            asked = PlannedSize(found, found, False, places)
        else:
            is_probe = plan.reason is not None and plan.reason.code is ReasonCode.PROBE
            asked = PlannedSize(plan.max_depth, plan.max_nodes, is_probe, places)
        num_rows, took = sum(map(bool, seen.paths)), (seen.draft_seconds, seen.seconds, seen.padded)
        return SeenRound(asked, tree, seen.draft.beliefs, seen.num_accepted, num_rows, *took, seen.prompts)

    def shape(self) -> DraftSize:
        """A tree counts as many guesses as were asked for, since their number follows the plan."""
        tree, found = self.tree, depths_of(self.tree)
        length = max(found)
        width = max(round(sum(found) / len(found)), min(length, 1))
        if not tree.is_chain and sum(tree.sizes) - len(found) != sum(found):
            width = max(self.asked.nodes)
        elif self.padded:
            length = width = tree.num_nodes - 1
        return DraftSize([length] * len(found) if self.padded else found, length, width)
