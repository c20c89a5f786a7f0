"""Causal multi-token prediction: a chain of modules. Each predicts one token further ahead than the module before it.

Module k at position t reads module k - 1's state there and the token t + 1 + k. So the newest token of a text completes one
column in *every* module, one position earlier in each further module. A guess below the root does the same in the modules that
do not need the target's states of guesses. (DeepSeek-V3, arXiv 2412.19437.)

    node at depth d:  s_k at place newest - (k - d), from s_{k-1} of the parent and the node's token,      k = d, d + 1 ..
                      q(. | node) = softmax(W norm_d(s_d))

Texts shorter than the number of modules begin with columns of zeros, which only lowers acceptance for a round. Lossless under
every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context, Drafter
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, NewColumns, read_columns, read_pending
from outrider.drafters.heads.head_growth import HeadGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.pending_states import PendingStates
from outrider.drafters.heads.trained import trained_head
from outrider.models.heads.layer import LayerCache
from outrider.models.heads.mtp import KIND, CausalMtp

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory


@final
class Mtp(HeadDrafter):
    """Trees from a chain of modules."""

    def __init__(self, head: CausalMtp, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def _device_memory(self, max_depth: int) -> HeadMemory | None:
        from outrider.device.drafters.heads.text_attention import ChainMemory  # needs triton

        return ChainMemory(self.head, max_depth)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HeadState:
        first, count = super().start(rows, taps), len(rows)
        nothing = torch.zeros(0, self.head.config.hidden_size, dtype=self._dtype, device=self._device)
        deeper = tuple(HeadState(PendingStates([nothing] * count, ()), self._layer.new(count)) for _ in self.head.layers[1:])
        return HeadState(first.pending, first.cache, deeper=deeper)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> MtpGrowth:
        """Let every module read the new states of the one before it, as far as tokens are known."""
        roots = list[Tensor]()
        for depth, module in enumerate(state.modules[:max_depth]):
            written: list[list[Tensor]] = [[] for _ in context.tokens]
            pieces, kept = read_columns(module, context, offset=depth + 1), module.kept
            assert module.cache is not None and kept is not None
            before = list(module.cache.lengths)
            roots.append(read_pending(module, pieces, partial(self._read, depth, module, written)))
            if depth + 1 < len(state.modules):
                after = state.modules[depth + 1]
                new = [torch.cat(parts)[: k - b] for parts, k, b in zip(written, kept, before, strict=True)]
                after.pending.add(new)
        return MtpGrowth(self.head, context, roots, layer=self._layer, modules=state.modules[: len(roots)])

    def _read(
        self, depth: int, module: HeadState, written: list[list[Tensor]], columns: NewColumns, chain: TokenTree
    ) -> Tensor:
        assert module.cache is not None
        entering = self.head.target_norm(columns.features) if depth == 0 else columns.features
        states = self.head.step(depth, columns.tokens, entering, self._layer.attending(chain, module.cache))
        for row, size in enumerate(columns.sizes):
            written[row].append(states[row, :size])
        return states


@final
class MtpGrowth(HeadGrowth):
    """Keeps, for every expanded node, the states of the modules that continue from it."""

    def __init__(
        self, head: CausalMtp, context: Context, roots: Sequence[Tensor], *, layer: LayerCache, modules: Sequence[HeadState]
    ) -> None:
        super().__init__(head, context)
        self._mtp, self._layer, self._modules = head, layer, modules
        self._all = list(roots)
        """[B, N, H] per module; zero for nodes at deeper levels."""

    def _root_states(self) -> Tensor:
        return self._all[0]

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        places = parents[..., None].expand(-1, -1, self._all[0].shape[2])
        forest = self.forest()
        above = [states.gather(1, places) for states in self._all]
        for depth, module in enumerate(self._modules):
            if depth < self.depth:
                states = torch.zeros_like(above[depth])
            else:
                assert module.cache is not None
                attending = self._layer.attending(forest, module.cache, forest.num_nodes - tokens.shape[1])
                states = self._mtp.step(depth, tokens, above[depth - 1], attending)
            self._all[depth] = torch.cat([self._all[depth], states], 1)
        return self._all[self.depth][:, -tokens.shape[1] :]


def build(parts: Parts) -> Drafter:
    return Mtp(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a chain of one-layer modules, each a token further (trained)",
    paper="DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437)",
    drafter=Mtp,
    build=build,
    defaults={"num_draft_tokens": 4, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
