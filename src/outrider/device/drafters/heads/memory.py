"""Memory of heads inside captured rounds: nothing, or keys and values made from the target's states.

Column c of a slot is the target's state of token c with token c + 1. A round finds all columns before its root. Whatever it
writes after them, for open places or rejected nodes, is overwritten by later columns. Attention is the decoder's
(``models/attention/tree_triton.py``). Heads with attention over the text are in ``text_attention.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from outrider.cache.page_pool import PagePool
from outrider.core.device_round import Frame
from outrider.device.drafters.trees.growers import Answers, Asked
from outrider.device.slot_pages import SlotPages
from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import Rows, Sights
from outrider.models.attention.tree_triton import attend_tree
from outrider.models.config import ModelConfig
from outrider.models.gpu.pages import OF_HEADS, hold_enough
from outrider.models.heads.block_head import BlockHead
from outrider.models.heads.head import Head
from outrider.models.heads.hydra import HydraHead
from outrider.models.heads.layer import Attending, Rotations
from outrider.models.heads.levels import HeadLevels
from outrider.models.layers import rotate

_WORD = 63
_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Head sizes that the kernels support."""
CHAIN = Sights(None, None)


NewLevels = Callable[[Tensor, Tensor], HeadLevels]
"""Calls the heads at the roots [B, 1], with the states [B, .., S] that their memory starts from."""


@dataclass(frozen=True, eq=False)
class HeadColumns:
    """N columns of R slots, or as many nodes after them."""

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
        """[R, N] tokens that are ``shift`` places after each column's state."""
        return self.texts.gather(1, (self.at() + shift).clamp(max=self.texts.shape[1] - 1))


@dataclass(frozen=True, eq=False)
class Roots:
    """The slots of a frame before a tree grows."""

    frame: Frame
    newest: Tensor
    """[B, K, S] values that the memory kept of the newest columns."""
    tokens: Tensor
    """[B, 1] int64"""
    num_levels: int
    """Number of levels of guesses."""

    @property
    def num_columns(self) -> Tensor:
        """[B] int64 known columns: all before the root."""
        return self.frame.lengths - 1

    def columns(self, starts: Tensor, count: int) -> HeadColumns:
        slots = torch.arange(self.frame.batch_size, device=starts.device)
        return HeadColumns(slots, starts, count, self.frame.tokens)


class HeadMemory(ABC):
    """The memory of heads for the columns of slots."""

    pages: SlotPages | None = None
    """Pages of the memory; None if there is nothing to keep."""
    num_kept: int = 1
    """Number of newest columns of which a value is kept."""
    width: int
    """Width of the value that is kept of a column."""

    def fits(self, capacity: int) -> bool:
        """Whether the memory has room for a text of this many tokens."""
        del capacity
        return True

    def move(self, old_size: int, new_size: int, slots: Sequence[int]) -> None:
        """The first of ``new_size`` slots take over the memory of these of ``old_size`` slots, except for pages."""
        del old_size, new_size, slots

    @abstractmethod
    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        """Store columns of ``batch_size`` slots, from the target's states [R, N, F]. Returns the value [R, N, S] kept of
        each."""

    def follow(self, batch_size: int, columns: HeadColumns, features: Tensor, newest: Tensor) -> Tensor:
        """Store the columns that a round added, which follow the kept values ``newest`` [R, K, S]. A memory may leave this to
        the next tree. Returns like ``read``."""
        del newest
        return self.read(batch_size, columns, features)

    def catch_up(self, batch_size: int, columns: HeadColumns, features: Tensor, newest: Tensor) -> Tensor:
        """Store the columns of many rounds without guesses, which are more than the next tree would read. Returns like
        ``read``."""
        return self.follow(batch_size, columns, features, newest)

    @abstractmethod
    def answers(self, roots: Roots) -> Answers:
        """The heads' answers at the roots."""


@final
class LevelAnswers(Answers):
    """Heads that are asked level by level, and whose guesses do not attend to the text."""

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

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        del batch_size, columns
        return features

    def answers(self, roots: Roots) -> Answers:
        return LevelAnswers(self._levels(roots.newest, roots.tokens))


class LayerMemory(HeadMemory, ABC):
    """Keys and values of columns, layer by layer, in pages. Texts take as many pages as they need, and graphs hold one
    address."""

    def __init__(self, head: nn.Module, layer: ModelConfig | None, rotations: Rotations, num_layers: int) -> None:
        """``layer`` describes the layers of the head."""
        assert layer is not None
        self._config, self._rotations, self._like = layer, rotations, next(head.parameters())
        shape, longest = (num_layers, self._config.num_kv_heads, self._config.head_dim), self._config.max_len
        self._pool = PagePool(shape, dtype=self._like.dtype, device=self._like.device)
        hold_enough(self._pool, longest=longest, share=OF_HEADS)
        self.pages = self._pages = SlotPages(self._pool, longest=longest)

    @staticmethod
    def can_hold(layer: ModelConfig | None) -> bool:
        """Whether the kernels support such layers."""
        return layer is not None and layer.head_dim in _HEAD_DIMS

    @final
    def fits(self, capacity: int) -> bool:
        return capacity <= self._config.max_len

    def _attending(self, batch_size: int, columns: HeadColumns, sights: Sights = CHAIN) -> list[SlotAttending]:
        """The attention of every layer. The places of the columns are computed once for all layers."""
        rows = self._pages.rows_of(columns.slots, columns.starts, batch_size)
        size, most = rows.page_len, rows.places.shape[1] * rows.page_len - 1
        places = (columns.at() + sights.start).clamp(max=most)
        at = places if sights.depths is None else (columns.starts[:, None] + sights.depths).clamp(max=most)
        owned = rows.places.gather(1, places // size).long()
        standing = ColumnPlaces(owned, places % size, rows, sights, self._rotations.at(at, self._like.dtype))
        return [SlotAttending(self._pool.memory(layer)[:2], standing, self._config) for layer in range(len(self._pool.block))]


@dataclass(frozen=True, eq=False)
class ColumnPlaces:
    """Places of columns in the memory of their slots, or of nodes after them."""

    pages: Tensor
    """[R, N] int64"""
    places: Tensor
    """[R, N] int64 in their pages."""
    rows: Rows
    sights: Sights
    rotation: tuple[Tensor, Tensor]


@final
class SlotAttending(Attending):
    """Attention of columns, or of nodes after them, over the columns of their slots in one layer."""

    def __init__(self, memory: tuple[Tensor, Tensor], standing: ColumnPlaces, config: ModelConfig) -> None:
        """``memory`` [P, kv heads, L, D] holds keys and values in pages."""
        self._memory, self._standing, self._config = memory, standing, config

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [R, kv heads, N, D]."""
        standing = self._standing
        for held, new in zip(self._memory, (rotate(keys, standing.rotation), values), strict=True):
            held[standing.pages, :, standing.places] = new.transpose(1, 2)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.put(keys, values)
        return self.look(queries)

    def look(self, queries: Tensor) -> Tensor:
        """Output of attention for queries [R, heads, N, D], after the nodes' keys and values were written."""
        standing, config, rows = self._standing, self._config, self._standing.rows
        asked = rotate(queries, standing.rotation).transpose(1, 2).contiguous()
        num_queries, capacity = asked.shape[1] * config.num_heads // config.num_kv_heads, rows.places.shape[1] * rows.page_len
        cut = cut_for(len(asked), num_queries, num_kv_heads=config.num_kv_heads, capacity=capacity, invariant=False)
        seen = attend_tree(asked, self._memory, rows, sights=standing.sights, cut=cut, scale=config.query_scale)
        return seen.view_as(asked).transpose(1, 2)


@final
class PrefixMemory(LayerMemory):
    """Hydra's layer over the target's states. The heads read its output at the newest column."""

    def __init__(self, head: HydraHead, levels: NewLevels) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=1)
        self._head, self._levels, self.width = head, levels, head.config.hidden_size

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
        return self._head.read(features, self._attending(batch_size, columns)[0])

    def answers(self, roots: Roots) -> Answers:
        return LevelAnswers(self._levels(roots.newest, roots.tokens))


@final
class BlockMemory(LayerMemory):
    """Layers over a block of open places, which see one another and the columns before them."""

    def __init__(self, head: BlockHead, levels: NewLevels) -> None:
        super().__init__(head, head.config.layer, head.rotations, num_layers=len(head.layers))
        self._head, self._levels, self.width = head, levels, 0
        assert head.num_places <= _WORD, "the places of a block are bits of one word"

    def read(self, batch_size: int, columns: HeadColumns, features: Tensor) -> Tensor:
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
