"""Hydra: Medusa's heads made sequential. The head of a level reads the tokens guessed on the way to each node.

A guess then follows from the guesses before it, which independent heads cannot do; the price is one small product per node
instead of per level. Hydra++ reads the target's states through one decoder layer of its own, which remembers the whole
text. (Ankner et al. 2024, arXiv 2402.05109.)

    q(. | node at depth d) = softmax(W_d mlp_d([g ; e(root) ; e(x_1) ; .. ; e(x_d)]))      g: state before the root, or
    prefix(states)

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadState, NewColumns, read_columns, read_pending
from outrider.drafters.heads.head_growth import LevelsGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.newest import NewestDrafter
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.hydra import KIND, HydraHead
from outrider.models.heads.levels import HeadLevels
from outrider.models.native.head_layer import native_layer

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


@final
class Hydra(NewestDrafter):
    """Trees from heads that read each other's guesses."""

    def __init__(self, head: HydraHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head
        self._prefix = native_layer(head.config.layer, head.native_prefix()) if self._native is not None else None

    def _new_cache(self, batch_size: int) -> ContiguousCache:
        return super()._new_cache(batch_size) if self._prefix is None else cast(Any, self._prefix.new_cache(batch_size))

    def _levels(self, features: Tensor, roots: Tensor) -> HydraLevels:
        return HydraLevels(self.head, self.head.read(features, None), roots)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LevelsGrowth:
        if state.cache is None:
            return super()._growth(state, context, max_depth)
        read = self._read_states(state, context)
        return LevelsGrowth(context, HydraLevels(self.head, read, torch.tensor(context.roots, device=context.device)[:, None]))

    def _read_states(self, state: HeadState, context: Context) -> Tensor:
        if state.cache is None:
            return super()._read_states(state, context)
        return read_pending(state, read_columns(state, context), partial(self._read, state))

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.memory import PrefixMemory  # needs triton

        if self._memory is None:
            return super()._device_memory(max_depth)
        return PrefixMemory(self.head, partial(HydraLevels, self.head))

    def _read(self, state: HeadState, columns: NewColumns, chain: TokenTree) -> Tensor:
        assert state.cache is not None
        if self._prefix is not None:
            return self._prefix.carried(chain, cast(Any, state.cache), self.head.read(columns.features, None)).to(self._dtype)
        return self.head.read(columns.features, self._layer.attending(chain, state.cache))


@final
class HydraLevels(HeadLevels):
    """Keeps the embeddings on the path to every node of the newest level."""

    def __init__(self, head: HydraHead, read: Tensor, roots: Tensor) -> None:
        """``read`` [B, 1, H] is the heads' view of the text before the roots [B, 1]."""
        super().__init__(head)
        self._hydra, self._read = head, read
        self._paths = [head.embed_tokens(roots).to(read.dtype)]
        """[B, M, H] per level: embeddings of the ancestors of the newest level's nodes."""
        self._first = 0

    def _root_states(self) -> Tensor:
        return self._hydra.state(0, self._read, self._paths)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        places = (parents - self._first)[..., None]
        self._first = self._num_asked
        above = [level.gather(1, places.expand(-1, -1, level.shape[2])) for level in self._paths]
        self._paths = [*above, self._hydra.embed_tokens(tokens).to(self._read.dtype)]
        return self._hydra.state(self.depth, self._read.expand(-1, tokens.shape[1], -1), self._paths)


def build(parts: Parts) -> Drafter:
    return Hydra(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="heads that read each other's guesses (trained)",
    paper="Ankner et al. 2024, Hydra (arXiv 2402.05109)",
    drafter=Hydra,
    build=build,
    defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
