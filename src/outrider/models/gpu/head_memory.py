"""What heads remember of the slots' texts inside captured rounds: nothing, or keys and values of the target's states.

Column c of a slot is the target's state of token c, beside token c + 1. A round finds all columns before its root.
What a round writes behind them, for open places or for nodes that were not accepted, is written over by the columns that come.
Attention is the decoder's (``models/attention/tree_triton.py``). Heads whose guesses look at the text: ``looking_heads.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.core.device_round import Frame
from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.attention.tree_triton import attend_tree
from outrider.models.config import ModelConfig
from outrider.models.gpu.growers import Answers, Asked
from outrider.models.heads.block_head import BlockHead
from outrider.models.heads.head import Head
from outrider.models.heads.hydra import HydraHead
from outrider.models.heads.layer import Attending, Rotations
from outrider.models.heads.levels import HeadLevels
from outrider.models.layers import rotate

_STEP = 256
_WORD = 63
_HEAD_DIMS = (16, 32, 64, 128, 256)
"""That the kernels know."""
CHAIN = Sights(None, None)


NewLevels = Callable[[Tensor, Tensor], HeadLevels]
"""Heads at the roots [B, 1], from what their memory begins with [B, .., S]."""


@dataclass(frozen=True, eq=False)
class Columns:
    """N columns of R slots, or as many nodes behind them."""

    slots: Tensor
    """[R] int64"""
    starts: Tensor
    """[R] int64 columns before them."""
    count: int
    texts: Tensor
    """[R, S] int64 tokens of the slots."""

    def at(self) -> Tensor:
        """[R, N]"""
        return self.starts[:, None] + torch.arange(self.count, device=self.starts.device)

    def tokens(self, shift: int = 1) -> Tensor:
        """[R, N] those ``shift`` places behind each column's state."""
        return self.texts.gather(1, (self.at() + shift).clamp(max=self.texts.shape[1] - 1))


@dataclass(frozen=True, eq=False)
class Roots:
    """The slots of a frame before a tree grows."""

    frame: Frame
    newest: Tensor
    """[B, K, S] of what the memory kept of the newest columns."""
    tokens: Tensor
    """[B, 1] int64"""
    num_levels: int
    """Levels of guesses that are wanted."""

    @property
    def num_columns(self) -> Tensor:
        """[B] int64 that are known: all before the root."""
        return self.frame.lengths - 1

    def columns(self, starts: Tensor, count: int) -> Columns:
        slots = torch.arange(self.frame.batch_size, device=starts.device)
        return Columns(slots, starts, count, self.frame.tokens)


class HeadMemory(ABC):
    """The slots' columns as heads remember them."""

    version: int = 0
    """Changes when memory that a captured round points to has moved."""
    num_kept: int = 1
    """Newest columns of which something is kept."""
    width: int
    """Width of what is kept of a column."""

    def fits(self, capacity: int) -> bool:
        """Whether a text of this many tokens can be remembered."""
        del capacity
        return True

    def make_room(self, batch_size: int, capacity: int) -> None:
        """Makes room for so many slots, whose texts grow to ``capacity`` tokens."""
        del batch_size, capacity

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """The first of ``new_size`` slots remember what these of ``old_size`` did."""
        del old_size, new_size, slots

    @abstractmethod
    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        """Remember columns of ``batch_size`` slots, from the target's states [R, N, F]; [R, N, S] what is kept of each."""

    def follow(self, batch_size: int, columns: Columns, features: Tensor, newest: Tensor) -> Tensor:
        """As ``read``, for columns that a round added behind the ``newest`` [R, K, S] that were kept. The next tree may read
        them instead."""
        del newest
        return self.read(batch_size, columns, features)

    def settle(self, roots: Roots) -> None:
        """A round added columns, and no tree will grow from here: remember what the next tree would have read."""
        del roots

    @abstractmethod
    def answers(self, roots: Roots) -> Answers:
        """The heads at the roots."""


@final
class LevelAnswers(Answers):
    """Heads that are asked level by level, and whose guesses do not look at the text."""

    def __init__(self, levels: HeadLevels) -> None:
        self._levels = levels

    def root(self) -> Tensor:
        return self._levels.at_root().float()

    def below(self, asked: Asked) -> Tensor:
        return self._levels.below(asked.tokens, asked.above).float()


@final
class NoMemory(HeadMemory):
    """The memory of heads that read the newest states alone."""

    def __init__(self, head: Head, num_kept: int, levels: NewLevels) -> None:
        self.width, self.num_kept = len(head.config.taps) * head.config.hidden_size, num_kept
        self._levels = levels

    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        del batch_size, columns
        return features

    def answers(self, roots: Roots) -> Answers:
        return LevelAnswers(self._levels(roots.newest, roots.tokens))


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

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        old, new = self._blocks[old_size], self._blocks[new_size]
        length = min(old.shape[4], new.shape[4])
        for place, slot in enumerate(slots):
            new[:, :, place, :, :length] = old[:, :, slot, :, :length]

    def _attending(self, batch_size: int, columns: Columns, sights: Sights = CHAIN) -> list[SlotAttending]:
        """The attention of every layer. Where columns stand is worked out once for all of them."""
        block = self._blocks[batch_size]
        most = block.shape[4] - 1
        places = (columns.at() + sights.start).clamp(max=most)
        at = places if sights.depths is None else (columns.starts[:, None] + sights.depths).clamp(max=most)
        rows, rotation = Rows(columns.starts.int(), columns.slots.int()), self._rotations.at(at, block.dtype)
        standing = Standing(columns.slots, places, rows, sights, rotation)
        return [SlotAttending(layer, standing, self._config) for layer in block]


@dataclass(frozen=True, eq=False)
class Standing:
    """Where columns stand in the memory of their slots, or nodes behind them."""

    slots: Tensor
    """[R] int64"""
    places: Tensor
    """[R, N] int64"""
    rows: Rows
    sights: Sights
    rotation: tuple[Tensor, Tensor]


@final
class SlotAttending(Attending):
    """Columns, or nodes behind them, over those of their slots in one layer."""

    def __init__(self, layer: Tensor, standing: Standing, config: ModelConfig) -> None:
        """``layer`` [2, B + 1, kv heads, S, D] of keys and values."""
        self._layer, self._standing, self._config = layer, standing, config

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [R, kv heads, N, D]."""
        standing = self._standing
        for held, new in zip(self._layer, (rotate(keys, standing.rotation), values), strict=True):
            held[standing.slots[:, None], :, standing.places] = new.transpose(1, 2)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.put(keys, values)
        return self.look(queries)

    def look(self, queries: Tensor) -> Tensor:
        """What queries [R, heads, N, D] see, the keys and values of the nodes being written."""
        standing, config, memory = self._standing, self._config, (self._layer[0], self._layer[1])
        asked = rotate(queries, standing.rotation).transpose(1, 2).contiguous()
        num_queries, capacity = asked.shape[1] * config.num_heads // config.num_kv_heads, memory[0].shape[2]
        cut = cut_for(len(asked), num_queries, num_kv_heads=config.num_kv_heads, capacity=capacity, invariant=False)
        seen = attend_tree(asked, memory, standing.rows, sights=standing.sights, cut=cut, scale=config.query_scale)
        return seen.view_as(asked).transpose(1, 2)


@final
class PrefixMemory(LayerMemory):
    """Hydra's layer over the target's states. What it makes of the newest column is what the heads read."""

    def __init__(self, head: HydraHead, levels: NewLevels) -> None:
        super().__init__(head, head.rotations, num_layers=1)
        self._head, self._levels, self.width = head, levels, head.config.hidden_size

    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        return self._head.read(features, self._attending(batch_size, columns)[0])

    def answers(self, roots: Roots) -> Answers:
        return LevelAnswers(self._levels(roots.newest, roots.tokens))


@final
class BlockMemory(LayerMemory):
    """Layers over a block of open places, which see one another and the columns before them."""

    def __init__(self, head: BlockHead, levels: NewLevels) -> None:
        super().__init__(head, head.rotations, num_layers=len(head.layers))
        self._head, self._levels, self.width = head, levels, 0
        assert head.num_places <= _WORD, "the places of a block are bits of one word"

    def read(self, batch_size: int, columns: Columns, features: Tensor) -> Tensor:
        attending = self._attending(batch_size, columns)
        for layer, entries in zip(attending, self._head.entries(self._head.fuse(features)), strict=True):
            layer.put(*entries)
        return features[..., :0]

    def answers(self, roots: Roots) -> Answers:
        head, (batch_size, _), device = self._head, roots.tokens.shape, roots.tokens.device
        tokens = torch.nn.functional.pad(roots.tokens, (0, head.num_places - 1), value=head.config.mask_token)
        depths = torch.arange(head.num_places, dtype=torch.int32, device=device).expand(batch_size, -1).contiguous()
        words = torch.full((batch_size, head.num_places, 1), (1 << head.num_places) - 1, device=device)  # all see all
        columns = roots.columns(roots.num_columns, head.num_places)
        places = head.block(tokens, self._attending(batch_size, columns, Sights(words, depths)), self._like.dtype)
        return LevelAnswers(self._levels(places, roots.tokens))
