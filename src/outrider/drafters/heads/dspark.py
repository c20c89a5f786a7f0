"""DSpark: one pass over a block, then tokens chosen from left to right with a bias from the token before. A confidence head
ends the draft.

The backbone runs once per round. After it, each guess costs a low-rank product, so trees can depend on their guesses as EAGLE's
do. Chains are the default, as in the paper (DeepSeek-AI 2026, arXiv 2607.05147): the confidence head says before each guess how
likely it is to be accepted. A policy that weighs guesses (``adaptive``) cuts the chain by it, and learns how far to trust it.

    q(. | node at depth d) = softmax(u_d + W2 m(node)),      belief(guess d + 1) = c_d          models/heads/dspark.py

Lossless under every rule that is exact for the draws: a belief is known before its guess is chosen (Lemma C of
docs/lossless.md).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import Drafter, Plan
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.block_drafter import BlockDrafter
from outrider.drafters.heads.head_growth import LevelsGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.trained import trained_head
from outrider.drafters.trees.levels import LevelGrowth
from outrider.models.heads.dspark import KIND, DsparkHead
from outrider.models.heads.levels import HeadLevels


@final
class Dspark(BlockDrafter):
    """Chains with confidences, and trees."""

    def __init__(self, head: DsparkHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _levels(self, places: Tensor, roots: Tensor) -> DsparkLevels:
        return DsparkLevels(self.head, places[:, self.head.skipped :], roots)

    def _trusted(self, draft: Draft, growth: LevelGrowth, plan: Plan) -> Draft:
        """A chain, cut where the policy expects too little of it."""
        if plan.doubt is None or self.head.confidence_head is None or not growth.is_chain:
            return draft
        assert isinstance(growth, LevelsGrowth) and isinstance(growth.levels, DsparkLevels)
        tree, beliefs = draft.tree, growth.levels.beliefs()
        known = [row[: size - 1] for row, size in zip(beliefs, tree.sizes, strict=True)]
        lengths = plan.doubt.lengths(known)
        longest = 1 + max(lengths)
        chain = TokenTree.chain(tree.tokens[:, :longest], [1 + length for length in lengths])
        kept = [row[:length] for row, length in zip(known, lengths, strict=True)]
        return Draft(chain, draft.draws, None if draft.q is None else draft.q[:, :longest], beliefs=kept)


@final
class DsparkLevels(HeadLevels):
    """Keeps the newest level's state of the Markov head."""

    def __init__(self, head: DsparkHead, places: Tensor, roots: Tensor) -> None:
        """``places`` [B, K, H] are the block's positions, one per depth."""
        super().__init__(head)
        self._dspark, self._normed, self._roots = head, head.norm(places), roots
        self._base = head.read_off(self._normed)
        self._memory, self._first = head.memory(places[:, :1]), 0
        self._levels: list[Tensor] = []

    def beliefs(self) -> list[list[float]]:
        """For each guess of a chain, the probability that it is accepted if all guesses before it are."""
        return torch.sigmoid(self._dspark.confidence(torch.cat(self._levels, 1)).float()).tolist()

    def _root_states(self) -> Tensor:
        return self._followed(self._roots, self._memory)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = (parents - self._first)[..., None]
        self._first = self._num_asked
        return self._followed(tokens, self._memory.gather(1, above.expand(-1, -1, self._memory.shape[2])))

    def _followed(self, tokens: Tensor, memory: Tensor) -> Tensor:
        place = self._normed[:, self.depth, None].expand(-1, tokens.shape[1], -1)
        state, self._memory = self._dspark.follow(place, tokens, memory)
        self._levels.append(state)
        return state

    def _read_off(self, states: Tensor) -> Tensor:
        """Logits of the newest level. The backbone's part was computed for all positions at once."""
        return self._base[:, self.depth, None] + self._dspark.bias(states)


def build(parts: Parts) -> Drafter:
    return Dspark(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a block in one pass, its tokens tied by a low-rank bias, ended by a confidence head (trained)",
    paper="DeepSeek-AI 2026, DSpark (arXiv 2607.05147)",
    drafter=Dspark,
    build=build,
    defaults={"num_draft_tokens": 5, "branching": "chain"},
    options=HeadOptions,
    needs=("heads",),
)
