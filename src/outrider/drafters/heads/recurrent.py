"""Recurrent heads: a state per node, moved on by the node's token. MLP speculator and ReDrafter.

A node costs a few small products and no attention, and its guess follows from those above it. ReDrafter's candidates are the
beams of a beam search, laid together where their beginnings agree; the others take the best nodes one by one. (MLP speculator:
Wertheimer et al. 2024, arXiv 2404.19124. ReDrafter: Zhang et al. 2024, arXiv 2403.09919.)

    state(node) = advance(state(parent), token of node),      q(. | node) = softmax(readout(state(node)))
    beams:  of the paths looked at, the most likely of full depth, as many as the nodes of their union allow

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from abc import ABC
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Plan
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_growth import HeadGrowth
from outrider.drafters.heads.head_tree import HeadDrafter, HeadOptions, HeadState, newest
from outrider.drafters.model.best_first import Pool
from outrider.drafters.trees.levels import kept_part
from outrider.models.heads.recurrent import RecurrentHead


class Recurrent(HeadDrafter, ABC):
    """Trees from a state that reads the guesses."""

    def __init__(self, head: RecurrentHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> RecurrentGrowth:
        del max_depth
        return RecurrentGrowth(self.head, context, newest(state))


@final
class RecurrentGrowth(HeadGrowth):
    """Keeps the states of the expanded nodes."""

    def __init__(self, head: RecurrentHead, context: Context, features: Tensor) -> None:
        super().__init__(head, context)
        self._recurrent = head
        self._all = head.advance(0, head.begin(features), self.tokens)

    def _root_states(self) -> Tensor:
        return self._all

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self._all.gather(1, parents[..., None].expand(-1, -1, self._all.shape[2]))
        states = self._recurrent.advance(self.depth, above, tokens)
        self._all = torch.cat([self._all, states], 1)
        return states


@final
class MlpSpeculation(Recurrent):
    """The best nodes."""


@final
class Redrafter(Recurrent):
    """The best beams."""

    def _chosen(self, pool: Pool, plan: Plan) -> TokenTree:
        return beam_tree(pool, plan)


def beam_tree(pool: Pool, plan: Plan) -> TokenTree:
    """Whole paths of every row's depth, the likeliest first, while the tree of them fits the row's number of nodes. The first
    path is always taken, cut to what fits."""
    num_rows, num_places = pool.tokens.shape
    parents, chances = pool.parents.tolist(), pool.chances.tolist()
    kept = torch.zeros(num_rows, num_places, dtype=torch.bool)
    for row in range(num_rows):
        kept[row, _beams(parents[row], chances[row], pool.depths, depth=plan.max_depth[row], room=plan.max_nodes[row])] = True
    return kept_part(pool.tokens, pool.parents, kept.to(pool.tokens.device))[0]


def _beams(parents: list[int], chances: list[float], depths: list[int], *, depth: int, room: int) -> list[int]:
    """Places of one row's tree, the root's among them."""
    ends = sorted((place for place, at in enumerate(depths) if at == depth), key=lambda place: -chances[place])
    taken = {0}
    for end in ends if depth else []:
        path = [end]
        while parents[path[-1]] not in taken:
            path.append(parents[path[-1]])
        if len(taken) == 1:
            path = path[-room:] if room else []
        if len(taken) - 1 + len(path) > room:
            break
        taken.update(path)
    return sorted(taken)
