"""EAGLE's drafter for vision-language targets. It reads the prompt's images once, and then grows trees as usual.

The first reading of a row holds its prompt, and all images in it. The heads decide what enters their layer in the place of an
image's columns. Columns that they leave out take no place in the cache, while the others keep their positions. Everything after
the prompt is text. (``models/heads/visual.py``; the kinds are MSD, ViSpec and SpecVLM.)

    cache of the draft     entries of columns 0 .. n - 1 that are kept;       a node at depth d below the root: position n + d

Lossless under every rule that is exact for the draws: only the draft sees less of an image than the target does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.cache.contiguous import ContiguousCache
from outrider.core.draft import Draws
from outrider.core.interfaces import Context
from outrider.core.tree import TokenTree
from outrider.drafters.heads.eagle import EagleGrowth
from outrider.drafters.heads.head_drafter import HeadDrafter, HeadState, NewColumns, last_of, newer, read_columns
from outrider.drafters.heads.head_options import HeadOptions
from outrider.models.heads.visual import ColumnBatch, Entries, VisualHead

_MOST_COLUMNS = 1 << 30
"""An image is never split: everything pending is read at once."""
_CHUNK = 512
"""Most entries in one pass of the layer."""


@dataclass(frozen=True, eq=False)
class _Kept:
    """Entries of every row without the dropped ones, padded."""

    entries: Entries
    positions: Tensor
    """[B, M]"""
    sizes: list[int]

    def piece(self, begin: int) -> _Kept:
        part = slice(begin, begin + _CHUNK)
        inputs, kept, carried = (each[:, part] for each in vars(self.entries).values())
        sizes = [min(max(size - begin, 0), _CHUNK) for size in self.sizes]
        return _Kept(Entries(inputs, kept, carried), self.positions[:, part], sizes)


@final
class VisualEagle(HeadDrafter):
    """Trees from a layer that continues the target's features and has seen the images."""

    def __init__(self, head: VisualHead, options: HeadOptions | None = None, *, draws: Draws = Draws.DETERMINISTIC) -> None:
        super().__init__(head, options, draws=draws)
        self.head = head

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HeadState:
        nothing = torch.zeros(self.head.num_carried, dtype=self._dtype, device=self._device)
        return replace(super().start(rows, taps), skipped=[0] * len(rows), carried=[nothing] * len(rows))

    def _growth(self, state: HeadState, context: Context, max_depth: int) -> EagleGrowth:
        del max_depth
        assert state.cache is not None
        root = self._read(state, context)
        return EagleGrowth(self.head, context, root, layer=self._layer, cache=state.cache, num_read=state.num_read)

    def _read(self, state: HeadState, context: Context) -> Tensor:
        """[B, 1, H + C] states at the roots, after all pending states were read and committed."""
        cache, first = state.cache, state.num_read
        assert cache is not None
        (columns,) = read_columns(state, context, most=_MOST_COLUMNS)
        entries = self.head.entries(self._columns(columns, first, state.carried))
        kept = _without_gaps(entries, columns.sizes, first)
        assert state.kept is not None
        num_new = [read - begin for read, begin in zip(state.kept, first, strict=True)]
        state.kept = [length + min(new, size) for length, new, size in zip(cache.lengths, num_new, kept.sizes, strict=True)]
        root = None
        for begin in range(0, max(kept.sizes), _CHUNK):
            piece = kept.piece(begin)
            states = self._through(piece, cache)
            cache.commit([range(size) for size in piece.sizes])
            root = newer(root, last_of(states, piece.sizes), piece.sizes)
        assert root is not None, "the last column of a row is text, and is kept"
        pairs = zip(state.skipped, columns.sizes, kept.sizes, strict=True)
        state.skipped = [skip + size - entered for skip, size, entered in pairs]
        state.carried = list(root[:, 0, self.head.config.hidden_size :])
        return root

    def _through(self, piece: _Kept, cache: ContiguousCache) -> Tensor:
        chain = TokenTree.chain(torch.zeros_like(piece.positions), piece.sizes)
        return self.head.through(piece.entries, self._layer.attending(chain, cache, positions=piece.positions))

    def _columns(self, columns: NewColumns, first: Sequence[int], carried: Sequence[Tensor]) -> ColumnBatch:
        """The columns as the heads take them. Images occur in a row's first reading, and never in its last column."""
        features, tokens = columns.features, columns.tokens
        sizes = torch.tensor(columns.sizes, device=tokens.device)[:, None]
        is_new = torch.tensor([begin == 0 for begin in first], device=tokens.device)[:, None]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return ColumnBatch(
            tokens,
            self.head.fuse(features),
            self.head.embedded(pad(features[:, 1:], (0, 0, 0, 1))),
            is_new & (place < sizes - 1) & (tokens == self.head.image_token),
            is_new & (place < sizes),
            torch.zeros_like(tokens),
            torch.stack(list(carried)),
        )


def _without_gaps(entries: Entries, sizes: Sequence[int], first: Sequence[int]) -> _Kept:
    """Each row's kept entries without gaps, with the positions of their columns."""
    device = entries.kept.device
    place = torch.arange(entries.kept.shape[1], device=device)
    kept = entries.kept & (place < torch.tensor(list(sizes), device=device)[:, None])
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    counts = kept.sum(1).tolist()
    order = order[:, : max(counts)]
    rows = torch.arange(len(order), device=device)[:, None]
    taken = Entries(entries.inputs[rows, order], kept[rows, order], entries.carried[rows, order])
    return _Kept(taken, order + torch.tensor(list(first), device=device)[:, None], counts)
