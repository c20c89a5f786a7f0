"""LongSpec inside a captured round: attention over its own short window, and over the pages of the target's last layer.

Keys and values of the window depend on tokens alone. A round rewrites those of as many tokens as the previous round can have
added, and then those of the nodes. Every node attends to the target's pages, which hold committed tokens only. The window is a
ring of pages, so its memory does not grow with the text. The oracle is ``drafters/heads/longspec.py``.

    s(node) = far(near(node over the last W tokens and its ancestors) over K_L, V_L of the text before the root)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.cache.page_pool import LayerPages, PagePool
from outrider.core.device_round import PIECE_LEN, Frame, LateTexts, PromptPieces, SlotTrees, Texts
from outrider.device.drafters.heads.memory import CHAIN, HeadColumns
from outrider.device.drafters.heads.texts import padded_tokens
from outrider.device.drafters.model.draft_model import Again
from outrider.device.drafters.trees.growers import Answers, Asked, Grower
from outrider.device.paged_drafter import PagedDrafter
from outrider.device.slot_pages import SlotPages
from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import Bounds, Rows, Sights
from outrider.models.attention.tree_triton import attend_tree
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.pages import OF_HEADS, hold_enough
from outrider.models.gpu.uploads import sent
from outrider.models.heads.layer import Attending
from outrider.models.heads.longspec import LongSpecHead
from outrider.models.layers import rotate


@final
class DeviceLongSpec(PagedDrafter):
    """Trees from a window and the target's pages."""

    def __init__(self, head: LongSpecHead, target: FastDecoder, grower: Grower) -> None:
        assert head.config.layer is not None
        self.head, self.layer, self._target, self._grower = head, head.config.layer, target, grower
        self.max_depth = grower.max_depth
        self._again = Again(grower.max_depth + 1, target.device)
        self._like, longest = next(head.parameters()), self.layer.max_len
        shape = (1, self.layer.num_kv_heads, self.layer.head_dim)
        self._pool = PagePool(shape, dtype=self._like.dtype, device=self._like.device)
        self._reach = head.window + self._again.count
        most = self._reach + grower.most_asked
        hold_enough(self._pool, longest=min(most, longest), share=OF_HEADS)
        super().__init__(SlotPages(self._pool, longest=longest, most=most))

    @staticmethod
    def can_read(head: LongSpecHead, target: FastDecoder) -> bool:
        """Whether the target's pages hold the keys and values that the head was trained on."""
        layer, (num_heads, _, head_dim) = head.config.layer, target.pool.block.shape[3:]
        is_known = layer is not None and (layer.num_kv_heads, layer.head_dim) == (num_heads, head_dim)
        return is_known and next(head.parameters()).dtype == target.dtype and target.num_layers == head.config.target_layers

    def num_nodes(self, depth: int) -> int:
        return self._grower.num_nodes(depth)

    def trees(self, batch_size: int, depth: int) -> SlotTrees | None:
        return self._grower.trees(batch_size, depth)

    def fits(self, capacity: int) -> bool:
        return capacity <= self.layer.max_len

    def seat(self, texts: Texts, *, batch_size: int) -> None:
        self.open(texts.slots, batch_size=batch_size)
        self.grow(dict(zip(texts.slots, map(len, texts.rows), strict=True)), batch_size=batch_size)
        self._catch_up(texts.slots, texts.rows, [0] * len(texts.rows), batch_size)

    def catch_up(self, late: LateTexts, *, batch_size: int) -> None:
        self._catch_up(late.slots, late.rows, late.known, batch_size)

    def _catch_up(self, slots: Sequence[int], rows: Sequence[Sequence[int]], known: Sequence[int], batch_size: int) -> None:
        """Reads at most a window of each text, since older tokens are never seen."""
        device = self._like.device
        begins = [max(0, old - self._again.count, len(row) - self._reach) for old, row in zip(known, rows, strict=True)]
        count = max(len(row) - begin for begin, row in zip(begins, rows, strict=True))
        starts = sent([min(begin, self._pages.longest - count) for begin in begins], torch.int64, device)
        owners, lengths = sent(list(slots), torch.int64, device), sent(list(map(len, rows)), torch.int64, device)
        with torch.inference_mode():
            self._write(batch_size, HeadColumns(owners, starts, count, padded_tokens(rows, device)), lengths)

    def read(self, frame: Frame, pieces: PromptPieces, features: Tensor | None) -> None:
        del features
        owners, read = torch.where(pieces.slots >= 0, pieces.slots, frame.batch_size), pieces.slots.clamp(min=0)
        columns = HeadColumns(owners, pieces.starts, PIECE_LEN, frame.tokens[read])
        self._write(frame.batch_size, columns, frame.lengths[read])

    def propose(self, frame: Frame, nodes: Tensor, depth: int) -> None:
        slots = torch.arange(frame.batch_size, device=nodes.device)
        columns = HeadColumns(slots, self._again.first(frame), self._again.count, frame.tokens)
        self._write(frame.batch_size, columns, frame.lengths)
        self._grower.grow(_LongAnswers(self, frame, nodes[:, :1]), frame, nodes, depth)

    def near(self, tokens: Tensor, lengths: Tensor, sights: Sights) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[B, N, H] of nodes after texts of ``lengths`` [B] tokens, and the rotations of their positions."""
        places = lengths[:, None] + sights.start + torch.arange(tokens.shape[1], device=tokens.device)
        at = places if sights.depths is None else lengths[:, None] + sights.depths
        rotation = self.head.rotations.at(at, self._like.dtype)
        attending = _WindowAttending(self, self._pages.rows(lengths), places, (sights, rotation))
        return self.head.near(self.head.embed(tokens, self._like.dtype), attending), rotation

    def far(self, frame: Frame, near: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[B, N, V] logits, from attention over the target's pages. No node sees the slots of other nodes."""
        assert frame.pages is not None, "a round says where the target keeps its slots"
        target, num_nodes = self._target, near.shape[1]
        asked = rotate(self.head.queries(near), rotation).transpose(1, 2).contiguous()
        rows = Rows((frame.lengths - 1).int(), frame.pages, target.page_len)
        alone = Sights(torch.zeros(*asked.shape[:2], 1, dtype=torch.int64, device=asked.device), None, -num_nodes)
        memory = target.pool.memory(target.num_layers - 1)
        seen = self.looked(asked, memory, rows, alone, capacity=target.num_slots)
        return self.head.readout(0, self.head.far(near, seen.nan_to_num(0.0).transpose(1, 2))).float()  # a text of one token

    def looked(
        self,
        asked: Tensor,
        memory: LayerPages | tuple[Tensor, Tensor],
        rows: Rows,
        sights: Sights,
        *,
        capacity: int,
        window: int = 0,
    ) -> Tensor:
        """[B, N, heads, D] output of attention for rotated queries of that shape."""
        num_heads, scale = self.layer.num_kv_heads, self.layer.query_scale
        num_queries = asked.shape[1] * asked.shape[2] // num_heads
        cut = cut_for(len(asked), num_queries, num_kv_heads=num_heads, capacity=capacity, invariant=False)
        return attend_tree(asked, memory, rows, sights=sights, cut=cut, scale=scale, bounds=Bounds(window))

    def _write(self, batch_size: int, columns: HeadColumns, lengths: Tensor) -> None:
        """Write keys and values of the tokens at columns, of texts of ``lengths`` [R]. The ring holds only the last ones;
        others go to the spare page."""
        rows, places = self._pages.rows_of(columns.slots, columns.starts, batch_size), columns.at()
        embedded = self.head.input_layernorm(self.head.embed(columns.tokens(0), self._like.dtype))
        keys, values = self.head.self_attn.entries(embedded)
        is_near = (places < lengths[:, None]) & (places >= lengths[:, None] - self._reach)
        self.put(rows, places, rotate(keys, self.head.rotations.at(places, self._like.dtype)), values, kept=is_near)

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """[P, kv heads, L, D] keys and values of tokens, in pages."""
        return self._pool.memory(0)[:2]

    def put(self, rows: Rows, places: Tensor, keys: Tensor, values: Tensor, *, kept: Tensor | None = None) -> None:
        """Write rotated keys and values [R, kv heads, N, D] at places [R, N] of their rows, if ``kept`` [R, N]."""
        size = rows.page_len
        places = places.clamp(max=rows.places.shape[1] * size - 1)
        pages = rows.places.gather(1, places // size).long()
        if kept is not None:
            pages = torch.where(kept, pages, self._pages.spare_page)
        for held, new in zip(self.memory, (keys, values), strict=True):
            held[pages, :, places % size] = new.transpose(1, 2)


@final
class _WindowAttending(Attending):
    """Attention of nodes over the last tokens of their slots and their ancestors. Their own keys and values are written
    first."""

    def __init__(
        self, drafter: DeviceLongSpec, rows: Rows, places: Tensor, standing: tuple[Sights, tuple[Tensor, Tensor]]
    ) -> None:
        """``standing`` holds the ancestors of nodes and their rotations."""
        self._drafter, self._rows, self._places, self._standing = drafter, rows, places, standing

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        drafter, rows, (sights, rotation) = self._drafter, self._rows, self._standing
        drafter.put(rows, self._places, rotate(keys, rotation), values)
        asked, window = rotate(queries, rotation).transpose(1, 2).contiguous(), drafter.head.window
        capacity = min(rows.places.shape[1] * rows.page_len, window + asked.shape[1])
        return drafter.looked(asked, drafter.memory, rows, sights, capacity=capacity, window=window).transpose(1, 2)


@final
class _LongAnswers(Answers):
    """Every node attends for itself. The keys and values of its ancestors are in the window."""

    def __init__(self, drafter: DeviceLongSpec, frame: Frame, roots: Tensor) -> None:
        self._drafter, self._frame, self._roots = drafter, frame, roots

    def root(self) -> Tensor:
        return self._logits(self._roots, self._frame.lengths - 1, CHAIN)

    def below(self, asked: Asked) -> Tensor:
        return self._logits(asked.tokens, self._frame.lengths, asked.sights)

    def _logits(self, tokens: Tensor, lengths: Tensor, sights: Sights) -> Tensor:
        near, rotation = self._drafter.near(tokens, lengths, sights)
        return self._drafter.far(self._frame, near, rotation)
