"""LongSpec: a draft layer with a short window of its own that reads the rest of the text in the target's last-layer cache.

It keeps only the window for each request, so its memory does not grow with the context. A node attends to the window and to its
ancestors in two parts, merged by their log-sum-exps. It attends to the target's cache without a tree mask, because only
verified tokens are in it. (Yang et al. 2025, LongSpec, arXiv 2502.17421.)

    q(. | node) = softmax(W_target s(node)),      s: models/heads/longspec.py

Lossless under every rule that is exact for the draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from outrider.cache.slots import LayeredCache
from outrider.core.device_round import DeviceDrafter
from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, ModelError
from outrider.core.interfaces import Context, Drafter, Observation, Target
from outrider.core.method_rows import MethodRow, Parts
from outrider.drafters.heads.device_growers import longspec_twin
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState
from outrider.drafters.heads.head_growth import HeadGrowth
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.pending_states import PendingStates
from outrider.drafters.heads.token_window import Near, TokenWindow
from outrider.drafters.heads.trained import trained_head
from outrider.models.attention.parts import Part, attend_part, merged
from outrider.models.heads.layer import Attending
from outrider.models.heads.longspec import KIND, LongSpecHead
from outrider.models.layers import rotate

if TYPE_CHECKING:
    from outrider.device.drafters.trees.growers import Grower


class Far(NamedTuple):
    """The target's last-layer cache."""

    keys: Tensor
    """[B, Hkv, S, D]"""
    values: Tensor
    sight: Tensor | None
    """[B, 1, S] mask of committed slots; None if all are committed."""


@final
class LongSpec(HeadDrafter):
    """Trees from a window and the target's cache."""

    def __init__(self, head: LongSpecHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head, self.taps = head, ()

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HeadState:
        del taps
        nothing = torch.zeros(0, 0)
        window = TokenWindow.empty(self.head, len(rows), self._dtype, self._device)
        return HeadState(PendingStates([nothing] * len(rows), ()), window=window)

    def observe(self, state: HeadState, observation: Observation) -> None:
        """Nothing to do: tokens are read from the text at the next draft, states from the target's cache."""

    def _twin(self, grower: Grower, target: Target) -> DeviceDrafter | None:
        return longspec_twin(self.head, grower, target)

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> LongSpecGrowth:
        del max_depth
        assert state.window is not None
        near = state.window.read(self.head, context.tokens, self._dtype)
        return LongSpecGrowth(self.head, context, near, self._far(context))

    def _far(self, context: Context) -> Far:
        cache, layer = context.cache, self.head.config.layer
        if not isinstance(cache, LayeredCache):
            raise CompositionError(
                "longspec reads the target's own cache, and this target keeps it in a form that cannot be read; "
                "load the model with fast=False, or use 'eagle3'"
            )
        keys, values = (part.to(self._dtype) for part in cache.entries(self.head.config.target_layers - 1))
        assert layer is not None
        if keys.shape[1::2] != (layer.num_kv_heads, layer.head_dim):
            found = f"{keys.shape[1]} heads of {keys.shape[3]} and the draft reads {layer.num_kv_heads} of {layer.head_dim}"
            raise ModelError(f"the target's cache has {found}; use the target that the heads were trained for")
        slots = torch.arange(keys.shape[2], device=keys.device)
        there = slots < torch.tensor(cache.lengths, device=keys.device)[:, None, None]
        return Far(keys, values, None if len(set(cache.lengths)) == 1 else there)


@final
class LongSpecGrowth(HeadGrowth):
    """Keeps the keys and values of the tree's nodes. The root's are in the window."""

    def __init__(self, head: LongSpecHead, context: Context, near: Near, far: Far) -> None:
        super().__init__(head, context)
        self._long, self._near, self._far = head, near, far
        self._roots = torch.tensor([len(row) - 1 for row in context.tokens], device=context.device)[:, None]
        self._keys, self._values = near.keys[:, :, :0], near.values[:, :, :0]

    def _root_states(self) -> Tensor:
        return self._asked(self.tokens)

    def _states(self, tokens: Tensor, parents: Tensor) -> Tensor:
        del parents
        return self._asked(tokens)

    def _asked(self, tokens: Tensor) -> Tensor:
        """[B, M, H] states of the newest nodes."""
        head, config = self._long, self._long.config.layer
        assert config is not None
        rotation = head.rotations.at((self._roots + self.depth).expand_as(tokens), self._near.keys.dtype)
        near = head.near(head.embed(tokens, self._near.keys.dtype), _NodeAttending(self, rotation))
        queries = rotate(head.queries(near), rotation)
        far = self._far
        return head.far(near, attend_part(queries, far.keys, far.values, scale=config.query_scale, sight=far.sight).seen)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the newest nodes to the window and, below the root, to their ancestors and themselves. All are
        rotated."""
        head, config = self._long, self._long.config.layer
        assert config is not None
        oldest = self._roots + self.depth - head.window
        held = self._near.positions
        seen = (held > oldest) & (held <= self._roots)
        prefix = attend_part(
            queries, self._near.keys, self._near.values, scale=config.query_scale, sight=seen[:, None]
        )  # no tree mask
        if not self.depth:
            return prefix.seen
        self._keys, self._values = torch.cat([self._keys, keys], 2), torch.cat([self._values, values], 2)
        return merged(prefix, self._tree_part(queries, config.query_scale))

    def _tree_part(self, queries: Tensor, scale: float) -> Part:
        forest = self.forest()
        sight = forest.ancestors[:, -queries.shape[2] :]
        close = forest.depths[:, None, :] + 1 > self.depth - self._long.window
        return attend_part(queries, self._keys, self._values, scale=scale, sight=sight & close)


@final
class _NodeAttending(Attending):
    """Passes the newest nodes' rotated queries, keys and values to a growth."""

    def __init__(self, growth: LongSpecGrowth, rotation: tuple[Tensor, Tensor]) -> None:
        self._growth, self._rotation = growth, rotation

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._growth.attend(rotate(queries, self._rotation), rotate(keys, self._rotation), values)


def build(parts: Parts) -> Drafter:
    return LongSpec(trained_head(parts, KIND), parts.options, draws=parts.draws)


ROW = MethodRow(
    summary="a layer with a short window that reads the target's last-layer cache (trained)",
    paper="Yang et al. 2025, LongSpec (arXiv 2502.17421)",
    drafter=LongSpec,
    build=build,
    defaults={"num_draft_tokens": 5, "num_tree_nodes": 32},
    options=HeadOptions,
    needs=("heads",),
)
