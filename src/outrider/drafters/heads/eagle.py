"""EAGLE: one decoder layer drafts on the target's own features, as deep as one likes.

The layer reads a column (feature, token after it) for every committed token and keeps keys and values of them; below the
root it goes on with its own states instead of features. True features replace the drafted ones after every round. (EAGLE-1:
Li et al. 2024, arXiv 2401.15077; EAGLE-3: Li et al. 2025, arXiv 2503.01840; the dynamic tree is EAGLE-2's, Li et al. 2024,
arXiv 2406.16858.)

    state(node) = layer(state(parent), e(token of node)),      q(. | node) = softmax(readout(state(node)))

Best-first trees by default, where the noise of the coupled rule is known to the ranking. Lossless under every rule that is
exact for the draws.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.device_round import DeviceDrafter
from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Target
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import Columns, HeadDrafter, HeadState, read_columns, read_pending
from outrider.drafters.heads.head_growth import HeadGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.models.heads.eagle import EagleHead
from outrider.models.heads.layer import LayerCache

if TYPE_CHECKING:
    from outrider.models.gpu.growers import Grower
    from outrider.models.gpu.head_memory import HeadMemory


@final
class Eagle(HeadDrafter):
    """Trees from a layer that continues the target's features."""

    def __init__(self, head: EagleHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _twin(self, grower: Grower, target: Target) -> DeviceDrafter | None:
        from outrider.models.gpu.eagle import DeviceEagle  # needs triton
        from outrider.models.gpu.head_layer import FastHead

        return (
            DeviceEagle(self.head, cast(Any, target), grower) if FastHead.can_run(self.head) else super()._twin(grower, target)
        )

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.models.gpu.looking_heads import StepMemory  # needs triton

        del max_depth
        return StepMemory(self.head)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> EagleGrowth:
        del max_depth
        assert state.cache is not None
        root = read_pending(state, read_columns(state, context), partial(self._read, state.cache))
        return EagleGrowth(self.head, context, root, layer=self._layer, cache=state.cache, num_read=state.num_read)

    def _read(self, cache: ContiguousCache, columns: Columns, chain: TokenTree) -> Tensor:
        return self.head.step(columns.tokens, self.head.fuse(columns.features), self._layer.attending(chain, cache))


@final
class EagleGrowth(HeadGrowth):
    """Keeps the states of the expanded nodes; the root's column is committed, so the others form a forest behind it."""

    def __init__(
        self, head: EagleHead, context: Context, root: Tensor, *, layer: LayerCache, cache: ContiguousCache, num_read: list[int]
    ) -> None:
        """``num_read`` are the columns before each root's children: not all of them need be in the cache."""
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
