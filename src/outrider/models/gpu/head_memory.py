"""What heads remember of the slots' texts inside captured rounds: nothing, or keys and values of the target's states.

Column c of a slot is the target's state of token c. Columns are read as soon as the target has computed them, so that a round
finds all up to the one before its root. What a round writes behind them, for a block of open places or for nodes that were not
accepted, is written over by the columns that come. Attention is the decoder's (``models/attention/tree_triton.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.attention.tree_triton import attend_tree
from outrider.models.config import ModelConfig
from outrider.models.heads.block_head import BlockHead
from outrider.models.heads.head import Head
from outrider.models.heads.hydra import HydraHead
from outrider.models.heads.layer import Attending, Rotations
from outrider.models.layers import rotate

_STEP = 256
_WORD = 63
_HEAD_DIMS = (16, 32, 64, 128, 256)
"""That the kernels know."""


@dataclass(frozen=True, eq=False)
class Columns:
    """N columns of R slots, or as many open places behind them."""

    slots: Tensor
    """[R] int64"""
    starts: Tensor
    """[R] int64 columns before them."""
    count: int

    def places(self, most: int) -> Tensor:
        """[R, N]"""
        steps = torch.arange(self.count, device=self.starts.device)
        return (self.starts[:, None] + steps).clamp(max=most - 1)


class HeadMemory(ABC):
    """The slots' columns as heads remember them."""

    version: int = 0
    """Changes when memory that a captured round points to has moved."""
    num_kept: int = 1
    """Newest columns whose states are kept."""
    width: int
    """Width of what ``read`` makes of a column."""

    def fits(self, capacity: int) -> bool:
        """Whether a text of this many tokens can be remembered."""
        del capacity
        return True

    def make_room(self, batch_size: int, capacity: int) -> None:
        """For so many slots, whose texts grow to ``capacity`` tokens."""
        del batch_size, capacity

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """The first of ``new_size`` slots remember what these of ``old_size`` did."""
        del old_size, new_size, slots

    @abstractmethod
    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        """Remember columns of ``batch_size`` slots, from the target's states [R, N, F]; [R, N, S] what heads make of each."""

    def at_roots(self, newest: Tensor, roots: Tensor, lengths: Tensor) -> Tensor:
        """What the levels of a tree begin with: ``newest`` [B, K, S] of what ``read`` made, unless there is more to do at the
        ``roots`` [B, 1] of texts of ``lengths`` [B]."""
        del roots, lengths
        return newest


@final
class NoMemory(HeadMemory):
    """For heads that read the newest states alone."""

    def __init__(self, head: Head, num_kept: int) -> None:
        self.width, self.num_kept = len(head.config.taps) * head.config.hidden_size, num_kept

    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        del batch_size, columns
        return features


class LayerMemory(HeadMemory, ABC):
    """Keys and values of columns, layer by layer."""

    def __init__(self, head: Head, rotations: Rotations, num_layers: int) -> None:
        assert head.config.layer is not None
        self._config, self._rotations, self._num_layers = head.config.layer, rotations, num_layers
        self._like = next(head.parameters())
        self._blocks: dict[int, Tensor] = {}
        """[layers, 2, B + 1, kv heads, S, D] by slots; the last row is no slot's."""

    @staticmethod
    def can_hold(head: Head) -> bool:
        """The kernels know its layers."""
        layer = head.config.layer
        return layer is not None and layer.head_dim in _HEAD_DIMS

    @final
    def fits(self, capacity: int) -> bool:
        return capacity <= self._config.max_len

    @final
    def make_room(self, batch_size: int, capacity: int) -> None:
        old = self._blocks.get(batch_size)
        if old is not None and old.shape[4] >= capacity + _STEP:
            return
        size, config = -(-(capacity + _STEP) // _STEP) * _STEP, self._config
        shape = (self._num_layers, 2, batch_size + 1, config.num_kv_heads, size, config.head_dim)
        with torch.inference_mode(False):  # whoever asks first, anybody may write to it
            block = self._blocks[batch_size] = self._like.new_zeros(shape)
        if old is not None:
            block[..., : old.shape[4], :] = old
        self.version += 1

    @final
    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        old, new = self._blocks[old_size], self._blocks[new_size]
        length = min(old.shape[4], new.shape[4])
        for place, slot in enumerate(slots):
            new[:, :, place, :, :length] = old[:, :, slot, :, :length]

    def _attending(self, batch_size: int, columns: Columns, sights: Sights) -> list[SlotAttending]:
        """The attention of every layer."""
        return [SlotAttending(layer, columns, sights, self._rotations, self._config) for layer in self._blocks[batch_size]]


@final
class SlotAttending(Attending):
    """Columns, or places behind them, over those of their slots in one layer."""

    def __init__(self, layer: Tensor, columns: Columns, sights: Sights, rotations: Rotations, config: ModelConfig) -> None:
        """``layer`` [2, B + 1, kv heads, S, D] of keys and values."""
        self._layer, self._columns, self._sights, self._config = layer, columns, sights, config
        self._places = columns.places(layer.shape[3])
        self._rotation = rotations.at(self._places, layer.dtype)

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [R, kv heads, N, D]."""
        slots = self._columns.slots[:, None]
        for held, new in zip(self._layer, (rotate(keys, self._rotation), values), strict=True):
            held[slots, :, self._places] = new.transpose(1, 2)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.put(keys, values)
        asked, config = rotate(queries, self._rotation).transpose(1, 2).contiguous(), self._config
        memory, rows = (self._layer[0], self._layer[1]), Rows(self._columns.starts.int(), self._columns.slots.int())
        num_queries, capacity = asked.shape[1] * config.num_heads // config.num_kv_heads, memory[0].shape[2]
        cut = cut_for(len(asked), num_queries, num_kv_heads=config.num_kv_heads, capacity=capacity, invariant=False)
        seen = attend_tree(asked, memory, rows, sights=self._sights, cut=cut, scale=config.query_scale)
        return seen.view_as(asked).transpose(1, 2)


@final
class PrefixMemory(LayerMemory):
    """Hydra's layer over the target's states. What it makes of the newest column is what the heads read."""

    def __init__(self, head: HydraHead) -> None:
        super().__init__(head, head.rotations, num_layers=1)
        self._head, self.width = head, head.config.hidden_size

    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        attending = self._attending(batch_size, columns, Sights(None, None))
        return self._head.read(features, attending[0])


@final
class BlockMemory(LayerMemory):
    """Layers over a block of open places, which see one another and the columns before them."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head, head.rotations, num_layers=len(head.layers))
        self._head, self.width = head, 0
        assert head.num_places <= _WORD, "the places of a block are bits of one word"

    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        attending = self._attending(batch_size, columns, Sights(None, None))
        for layer, entries in zip(attending, self._head.entries(self._head.fuse(features)), strict=True):
            layer.put(*entries)
        return features[..., :0]

    def at_roots(self, newest: Tensor, roots: Tensor, lengths: Tensor) -> Tensor:
        """[B, P, H] the states of all places."""
        del newest
        head, (batch_size, _), device = self._head, roots.shape, roots.device
        tokens = torch.nn.functional.pad(roots, (0, head.num_places - 1), value=head.config.mask_token)
        depths = torch.arange(head.num_places, dtype=torch.int32, device=device).expand(batch_size, -1).contiguous()
        words = torch.full((batch_size, head.num_places, 1), (1 << head.num_places) - 1, device=device)  # all see all
        columns = Columns(torch.arange(batch_size, device=device), lengths - 1, head.num_places)
        return head.block(tokens, self._attending(batch_size, columns, Sights(words, depths)), self._like.dtype)
