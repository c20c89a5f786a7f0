"""EAGLE: one decoder layer drafts on the target's own features, to any depth.

The layer reads a column (feature, token after it) for every committed token and keeps their keys and values. Below the root it
reads its own output states instead of features. After every round the true features replace them. (EAGLE-1: Li et al. 2024,
arXiv 2401.15077; EAGLE-3: Li et al. 2025, arXiv 2503.01840; the dynamic tree is EAGLE-2's, Li et al. 2024, arXiv 2406.16858.)

    state(node) = layer(state(parent), e(token of node)),      q(. | node) = softmax(readout(state(node)))

By default trees are best-first, and candidates are ranked with the noise of the coupled rule. Lossless under every rule that is
exact for the draws.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.cache.paged import PagedCache
from outrider.core.device_round import DeviceDrafter
from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Plan, Target
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import MOST_COLUMNS, HeadDrafter, HeadState, NewColumns, read_columns, read_pending
from outrider.drafters.heads.head_growth import HeadGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.layer import LayerCache
from outrider.models.native.eagle import native_eagle

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory
    from outrider.device.drafters.trees.growers import Grower


@final
class Eagle(HeadDrafter):
    """Trees from a layer that continues the target's features."""

    def __init__(self, head: EagleHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head
        self._native = native_eagle(head) if self._device.type == "cpu" and self._bits == 16 else None

    def _new_cache(self, batch_size: int) -> ContiguousCache:
        return super()._new_cache(batch_size) if self._native is None else cast(Any, self._native.new_cache(batch_size))

    def _in_one_call(self, state: HeadState, context: Context, plan: Plan) -> TokenTree | None:
        growing = None if self._native is None else self._growing(context, plan)
        if self._native is None or growing is None or max(map(len, state.pending.rows)) > MOST_COLUMNS:
            return None
        [columns] = read_columns(state, context)
        chain = TokenTree.chain(columns.tokens, columns.sizes)
        return self._native.tree(columns.features, chain, cast(PagedCache, state.cache), growing)

    def _twin(self, grower: Grower, target: Target) -> DeviceDrafter | None:
        from outrider.device.drafters.heads.eagle import DeviceEagle  # needs triton
        from outrider.device.drafters.heads.eagle_layer import FastHead

        return (
            DeviceEagle(self.head, cast(Any, target), grower) if FastHead.can_run(self.head) else super()._twin(grower, target)
        )

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.text_attention import StepMemory  # needs triton

        del max_depth
        return StepMemory(self.head)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> EagleGrowth:
        del max_depth
        assert state.cache is not None
        root = read_pending(state, read_columns(state, context), partial(self._read, state.cache))
        return EagleGrowth(self.head, context, root, layer=self._layer, cache=state.cache, num_read=state.num_read)

    def _read(self, cache: ContiguousCache, columns: NewColumns, chain: TokenTree) -> Tensor:
        return self.head.step(columns.tokens, self.head.fuse(columns.features), self._layer.attending(chain, cache))


@final
class EagleGrowth(HeadGrowth):
    """Keeps the states of the expanded nodes. The root's column is committed, so the others form a forest after it."""

    def __init__(
        self,
        head: EagleHead,
        context: Context,
        root: Tensor,
        *,
        layer: LayerCache,
        cache: ContiguousCache,
        num_read: list[int],
    ) -> None:
        """``num_read`` counts the columns before each root's children. Not all of them need be in the cache."""
        super().__init__(head, context)
        self._eagle, self._layer, self._cache = head, layer, cache
        self._all, self._first = root, torch.tensor(num_read, device=root.device)[:, None]

    def _root_states(self) -> Tensor:
        return self._all

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self._all.gather(1, parents[..., None].expand(-1, -1, self._all.shape[2]))
        forest = self.forest()
        start = forest.num_nodes - tokens.shape[1]
        positions = forest.depths[:, start:] + self._first
        attending = self._layer.attending(forest, self._cache, start, positions=positions)
        states = self._eagle.step(tokens, above, attending)
        self._all = torch.cat([self._all, states], 1)
        return states
