"""The base of drafters that grow trees with a draft model: the model, its cache, and the nodes it was fed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.tree import TokenTree
from outrider.drafters.model.catch_up import cut_back, room
from outrider.drafters.model.draft_growth import DraftGrowth


@dataclass
class TreeState(RowState):
    """The draft model's cache, and the places of this round's nodes in it."""

    cache: Cache
    slots: Tensor | None = None
    """[B, N] number of each proposed node in the draft's forest, -1 where it was not fed."""

    def fork(self, rows: Sequence[int]) -> TreeState:
        return TreeState(self.cache.fork(rows))

    def narrow(self, rows: Sequence[int]) -> TreeState:
        return TreeState(self.cache.narrow(rows))

    def join(self, other: TreeState) -> TreeState:
        return TreeState(self.cache.join(other.cache))


class TreeDrafter(Drafter, ABC):
    """A draft model with a way of growing trees."""

    shape: ClassVar = Shape.TREE
    waits: ClassVar = ""
    drafts_alone = True

    def __init__(self, model: Target, *, vocab_size: int, draws: Draws) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.draws = draws

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> TreeState:
        del taps
        return TreeState(self.model.new_cache(len(rows)))

    def propose(self, state: TreeState, context: Context, plan: Plan) -> Draft:
        limits = zip(context.tokens, plan.max_depth, plan.max_nodes, strict=True)
        depths = [room(self.model, tokens, min(depth, nodes)) for tokens, depth, nodes in limits]
        if not any(depths):
            return context.without_guesses(self.draws)
        plan = Plan(tuple(depths), tuple(n if d else 0 for n, d in zip(plan.max_nodes, depths, strict=True)))
        guessed = self._guessed(state, context, plan)
        if guessed is not None:
            tree, expanded = guessed
            state.slots = expanded - 1
            return Draft(tree, self.draws)
        growth = DraftGrowth(self.model, state.cache, context, vocab_size=self.vocab_size, depths=depths)
        draft, expanded = self._grow(growth, plan)
        if min(depths) != max(depths):  # the deepest guesses of a short row were fed only to keep its neighbours company
            leaves = draft.tree.depths >= torch.tensor(depths, device=context.device)[:, None]
            expanded = expanded.masked_fill(leaves, 0)
        state.slots = expanded - 1 if growth.num_expanded > 1 else None  # the root is not in the forest
        return draft

    def _guessed(self, state: TreeState, context: Context, plan: Plan) -> tuple[TokenTree, Tensor] | None:
        """The tree in one call, with its nodes' numbers, if the model can draft by itself; None to grow it level by level."""
        del state, context, plan
        return None

    def observe(self, state: TreeState, observation: Observation) -> None:
        """Keep the accepted guesses that were fed; the next round reads the others."""
        if state.slots is not None:
            slots = state.slots.tolist()
            kept = [[row[node] for node in path[1:] if row[node] >= 0] for row, path in zip(slots, observation.paths)]
            state.cache.commit(kept)
            state.slots = None

    def rewind(self, state: TreeState, lengths: Sequence[int]) -> None:
        cut_back(state.cache, lengths)

    @abstractmethod
    def _grow(self, growth: DraftGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        """A draft within the plan, and [B, N] the number of each node in ``growth``; 0 for nodes that are not in it."""
