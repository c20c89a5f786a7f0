"""Attention of the N nodes of each row over [committed tokens | nodes], with PyTorch's scaled-dot-product kernels.

Node i of row b sees every committed token of its row and those nodes that are its ancestors or itself. A sliding window further
hides what lies ``window`` or more *positions* back, where a node's position is the row's length plus its depth. The mask is
made once per pass and shared by the layers (a ``Sight`` per window size). The queries that share a key head are folded into the
length dimension, [B, Hkv, G * N, D], so that keys are never expanded.

There are three cases. One node per row, with rows of equal length, sees everything, so there is no mask. A chain with rows of
equal length has a mask that depends only on slot minus length, so it is a slice of an earlier one. Any other mask is built from
the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.tree import TokenTree
from outrider.models.attention.without_cudnn import WITHOUT_CUDNN

_ALIGN = 16
"""Rows of a mask begin at multiples of this many elements on a GPU, where kernels fault on less or copy it in every layer."""


def _aligned(mask: Tensor) -> Tensor:
    """A slice of a stored mask begins anywhere, and a mask has any number of columns; a GPU gets an aligned copy."""
    if mask.device.type != "cuda":
        return mask
    *shape, num_columns = mask.shape
    return mask.new_empty(*shape, -(-num_columns // _ALIGN) * _ALIGN)[..., :num_columns].copy_(mask)


@dataclass(frozen=True, eq=False)
class Sight:
    """The attention mask of a pass's nodes, for the layers of one window size."""

    begin: int
    """No node sees a slot before this one."""
    bias: Tensor | None
    """[1 or B, 1, G * N, S - begin] added to the attention scores: 0 where seen, -inf where not; None if all is seen."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, sight: Sight, scale: float) -> Tensor:
    """[B, Hkv, G * N, D] from queries of that shape and the [B, Hkv, S, D] keys and values of a layer."""
    if sight.begin:
        keys, values = keys[:, :, sight.begin :], values[:, :, sight.begin :]
    with WITHOUT_CUDNN if queries.device.type == "cuda" else nullcontext():
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=sight.bias, scale=scale)


def attend_softcapped(queries: Tensor, keys: Tensor, values: Tensor, *, sight: Sight, scale: float, cap: float) -> Tensor:
    """Attention whose scores are squashed into (-cap, cap), written out because no fused kernel does that."""
    if sight.begin:
        keys, values = keys[:, :, sight.begin :], values[:, :, sight.begin :]
    scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(scale / cap).tanh_().mul_(cap)
    if sight.bias is not None:
        scores = scores.add_(sight.bias)
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def attend_with_sinks(queries: Tensor, keys: Tensor, values: Tensor, *, sight: Sight, scale: float, sinks: Tensor) -> Tensor:
    """Attention beside ``sinks`` [Hq], a score per query head that takes its share of the softmax and adds nothing."""
    if sight.begin:
        keys, values = keys[:, :, sight.begin :], values[:, :, sight.begin :]
    scores = torch.matmul(queries, keys.transpose(2, 3)).float().mul_(scale)
    if sight.bias is not None:
        scores = scores.add_(sight.bias)
    batch_size, num_kv_heads, num_queries = queries.shape[:3]
    own = sinks.float().view(1, num_kv_heads, -1, 1)
    own = own.repeat_interleave(num_queries // own.shape[2], 2).expand(batch_size, -1, -1, -1)
    shares = torch.softmax(torch.cat((scores, own), -1), -1)[..., :-1]
    return torch.matmul(shares.to(values.dtype), values)


class SightMaker:
    """Makes the sights of a pass; remembers the masks of chains."""

    def __init__(self, windows: Iterable[int | None], num_groups: int, *, dtype: torch.dtype) -> None:
        self._windows = tuple(dict.fromkeys(windows))
        self._num_groups = num_groups
        self._dtype = dtype
        self._chains: dict[tuple[int, int | None, torch.device], Tensor] = {}

    def __call__(self, tree: TokenTree, lengths: Sequence[int], start: int = 0) -> dict[int | None, Sight]:
        """A sight of nodes ``start``.. for every window size of the model."""
        longest = max(lengths) + tree.num_nodes
        sights: dict[int | None, Sight] = {}
        for window in self._windows:
            active = None if window is None or window >= longest else window
            if active not in sights:
                sights[active] = self._sight(tree, lengths, active, start)
            sights[window] = sights[active]
        return sights

    def _sight(self, tree: TokenTree, lengths: Sequence[int], window: int | None, start: int) -> Sight:
        shortest = min(lengths)
        if shortest != max(lengths) or not tree.is_chain:
            begin = 0 if window is None else max(0, shortest - window + 1)
            return Sight(begin, self._tree_bias(tree, lengths, window=window, begin=begin, start=start))
        before = shortest + start  # on a chain, nodes scored earlier are seen as committed tokens are
        begin = 0 if window is None else max(0, before - window + 1)
        if tree.num_nodes - start == 1:
            return Sight(begin, None)
        return Sight(begin, self._chain_bias(tree.num_nodes - start, before - begin, window, tree.tokens.device))

    def _chain_bias(self, num_nodes: int, num_before: int, window: int | None, device: torch.device) -> Tensor:
        """The last ``num_before + N`` columns of a mask over many committed tokens."""
        key = (num_nodes, window, device)
        stored = self._chains.get(key)
        if stored is None or stored.shape[1] < num_before + num_nodes:
            if len(self._chains) >= 32:
                self._chains.clear()
            stored = self._chains[key] = self._stored_chain(key, num_before)
        return _aligned(stored[:, stored.shape[1] - num_before - num_nodes :])[None, None]

    def _stored_chain(self, key: tuple[int, int | None, torch.device], num_before: int) -> Tensor:
        num_nodes, window, device = key
        num_columns = num_before + num_before // 2 + 256 + num_nodes
        nodes = torch.arange(num_nodes, device=device)[:, None]
        slots = torch.arange(num_columns, device=device) - (num_columns - num_nodes)
        seen = slots <= nodes
        if window is not None:
            seen &= nodes - slots < window
        return self._bias(seen)

    def _tree_bias(self, tree: TokenTree, lengths: Sequence[int], *, window: int | None, begin: int, start: int) -> Tensor:
        """[B, 1, G * N, S - begin] for trees, or for rows of different lengths."""
        device, num_nodes = tree.tokens.device, tree.num_nodes
        starts = torch.tensor(lengths, device=device)[:, None]
        nodes = torch.arange(begin, max(lengths) + num_nodes, device=device) - starts
        index = nodes.clamp(0, num_nodes - 1)
        is_node = (nodes >= 0) & (nodes < num_nodes)
        ancestor = tree.ancestors.gather(2, index[:, None].expand(-1, num_nodes, -1))
        seen = torch.where(is_node[:, None], ancestor, (nodes < 0)[:, None])
        if window is not None:
            depths = tree.depths
            reach = torch.where(is_node, depths.gather(1, index), nodes)
            seen = seen & (depths[:, :, None] - reach[:, None] < window)
        return _aligned(self._bias(seen[:, start:]))[:, None]

    def _bias(self, seen: Tensor) -> Tensor:
        """Additive form, one copy for each query that shares a key head."""
        bias = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return bias.repeat(*[1] * (seen.dim() - 2), self._num_groups, 1)
