"""A round as the default policy stores it until it has time to learn from it, and what rounds have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from outrider.core.interfaces import Observation, Plan
from outrider.core.reason import ReasonCode
from outrider.core.scores import Scores

_NO_SCORES = Scores(torch.empty(0))


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


def without_scores(seen: Observation) -> Observation:
    """The observation without its large parts."""
    return replace(seen, scores=_NO_SCORES, draft=replace(seen.draft, q=None, resume=None))


def is_probe(plan: Plan | None) -> bool:
    return plan is not None and plan.reason is not None and plan.reason.code is ReasonCode.PROBE


def shape_of(seen: Observation) -> tuple[Sequence[int], Sequence[int], int, int]:
    """Guesses along a path that were asked for and that were found, by row. Then the longest path, and the guesses of a row in
    the pass. A tree counts as many guesses as were asked for, since their number follows the plan."""
    tree, plan = seen.draft.tree, seen.plan
    found = tree.heights
    length = max(found)
    width = max(round(sum(found) / len(found)), min(length, 1))
    if not tree.is_chain and sum(tree.sizes) - len(found) != sum(found):
        width = max(plan.max_nodes if plan else found)
    elif seen.padded:
        length = width = tree.num_nodes - 1
    return plan.max_depth if plan else found, [length] * len(found) if seen.padded else found, length, width
