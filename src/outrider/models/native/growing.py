"""Options and output arrays of best-first trees that native code grows in one call."""

from __future__ import annotations

from ctypes import addressof
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.guessing_target import TreeSearch
from outrider.core.interfaces import Plan
from outrider.core.rng import Noise
from outrider.core.tempering import Tempering
from outrider.core.tree import TokenTree
from outrider.models.native.structs import ShapingStruct, TreeStruct


@dataclass(frozen=True, eq=False)
class Growing:
    """Options of a tree that native code grows."""

    search: TreeSearch
    plan: Plan
    tempering: Tempering
    noise: Noise
    states: Tensor | None = None
    """[B, N, H] float32, contiguous: the input states of the chains' nodes, in models that continue states. They are
    overwritten."""
    ids: Tensor | None = None
    """[V] the target's token for each token of the model, where the two differ."""
    vocab_size: int = 0
    """The target's vocabulary size, where the two differ."""
    in_beams: bool = False
    """Whether the tree holds the likeliest whole paths instead of the likeliest nodes."""


@final
class GrownTrees:
    """Trees of B rows, written by a native call that is given ``struct``."""

    def __init__(self, growing: Growing, vocab_size: int) -> None:
        search, plan, noise = growing.search, growing.plan, growing.noise
        sizes = [n if d else 0 for n, d in zip(plan.max_nodes, plan.max_depth, strict=True)]
        capacity = 1 + max(sizes)
        self.depth = max(plan.max_depth)
        limits = torch.tensor(plan.max_depth, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32)
        shaping = ShapingStruct.of(growing.tempering, growing.vocab_size or vocab_size)
        self._tokens, self._parents, self._numbers = torch.zeros(3, len(sizes), capacity, dtype=torch.int64)
        self._counts = torch.zeros(len(sizes), dtype=torch.int32)
        given = (*limits, noise.seeds, noise.positions)
        written = (self._tokens, self._parents, self._numbers, self._counts)
        (depths, most, seeds, positions), arrays = ([one.data_ptr() for one in some] for some in (given, written))
        ids = None if growing.ids is None else growing.ids.data_ptr()
        fixed = self.depth, search.width, search.num_children, capacity, search.tau
        self.struct = TreeStruct(*fixed, depths, most, addressof(shaping), seeds, positions, *arrays, ids, growing.in_beams)
        self._held = shaping, given, growing.ids

    def below(self, roots: Tensor) -> tuple[TokenTree, Tensor]:
        """The trees below the roots [B], and [B, N] the number of each node among the fed ones, 0 for nodes that were not
        fed."""
        tokens, parents, num_nodes = self._tokens, self._parents, int(self._counts.max())
        tokens[:, 0] = roots
        sizes = tuple(self._counts.tolist())
        return TokenTree(tokens[:, :num_nodes], parents[:, :num_nodes], sizes, is_chain=num_nodes == 1), self._numbers[
            :, :num_nodes
        ]
