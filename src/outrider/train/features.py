"""From documents to packed rows with the target's states, computed when needed (or once: ``stored.py``).

Every document goes through the target alone, in a prefill with taps, which any target has. So its states are exactly those of
generation. Documents are then packed into rows, so that there is little padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from outrider.cache.slots import LayeredCache
from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache, Target
from outrider.models.heads import PackedTexts
from outrider.train.data import Document
from outrider.vision.prompts import EmbeddedPrompt

_STEP = 64
"""Row lengths are multiples of this, so that batches have few different shapes."""


def places_of(lengths: Sequence[int], row_len: int) -> list[tuple[int, int]]:
    """(row, column) of every document: the longest first, into the first row with room."""
    used: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, taken in enumerate(used) if taken + lengths[index] <= row_len), len(used))
        if row == len(used):
            used.append(0)
        places[index] = (row, used[row])
        used[row] += lengths[index]
    return [places[i] for i in range(len(lengths))]


def compute(target: Target, documents: Sequence[Document], taps: Sequence[int]) -> dict[int, list[Tensor]]:
    """Tapped states [len, H] of every document, including the last layer's output. One tap further stands for the last
    layer's keys and values."""
    wanted = sorted({*(tap for tap in taps if tap <= target.num_layers), target.num_layers})
    cache = target.new_cache(len(documents))
    prompts = [None if document.seen is None else document.seen() for document in documents]  # held while they are read
    rows = [_read_ids(document, prompt) for document, prompt in zip(documents, prompts, strict=True)]
    found = target.prefill(rows, cache, taps=wanted)
    states = {tap: list(found[tap]) for tap in wanted}
    if target.num_layers + 1 in taps:
        states[target.num_layers + 1] = _entries(cache, target.num_layers - 1)
    return states


def _read_ids(document: Document, prompt: EmbeddedPrompt | None) -> Sequence[int]:
    """The token ids of a document as the target reads them."""
    return document.tokens if prompt is None else [*prompt.read_ids, *document.tokens[len(prompt.read_ids) :]]


def _entries(cache: Cache, layer: int) -> list[Tensor]:
    """[len, 2 Hkv D] concatenated keys and values of a layer, for every row of a target's cache."""
    if not isinstance(cache, LayeredCache):
        raise OptionError("the target's cache cannot be read as these heads do; load the target with fast=False")
    both = torch.stack(cache.entries(layer)).permute(1, 3, 0, 2, 4).flatten(2)
    return [row[:length] for row, length in zip(both, cache.lengths, strict=True)]


@final
class DocumentRows:
    """Documents packed into rows of at most ``row_len`` positions. ``last`` is the tap of the last layer's output.

    Rows are as long as the fullest one, rounded up, because padding costs time.
    """

    def __init__(self, states: dict[int, list[Tensor]], documents: Sequence[Document], *, row_len: int, last: int) -> None:
        lengths = [len(document.tokens) for document in documents]
        row_len = max(row_len, *lengths)
        places = places_of(lengths, row_len)
        fullest = max(column + length for (_, column), length in zip(places, lengths, strict=True))
        row_len = min(row_len, -(-fullest // _STEP) * _STEP)
        num_rows, self._last = 1 + max(row for row, _ in places), last
        tokens = np.zeros((num_rows, row_len), dtype=np.int64)  # cheaper to fill piece by piece than tensors are
        segments, positions = np.full_like(tokens, -1), np.zeros_like(tokens)
        supervised = np.zeros_like(tokens, dtype=np.bool_)
        for index, (document, (row, column)) in enumerate(zip(documents, places, strict=True)):
            end = column + lengths[index]
            tokens[row, column:end] = document.tokens
            segments[row, column:end] = index
            positions[row, column:end] = np.arange(lengths[index])
            counted = slice(document.begin, None) if document.counted is None else list(document.counted)
            supervised[row, column:end][counted] = True
        device = states[last][0].device
        self._laid = {tap: _laid(found, places, num_rows, row_len) for tap, found in states.items()}
        self._facts = [torch.from_numpy(facts).to(device) for facts in (tokens, segments, positions, supervised)]

    def packed(self, taps: Sequence[int]) -> PackedTexts:
        """The rows with the concatenated states of ``taps``."""
        tokens, segments, positions, supervised = self._facts
        last = self._laid[self._last]
        features = torch.cat([self._laid[tap].float() for tap in taps], -1) if taps else last[..., :0]
        return PackedTexts(tokens, features, last, segments, positions, supervised)


def _laid(states: Sequence[Tensor], places: Sequence[tuple[int, int]], num_rows: int, row_len: int) -> Tensor:
    """[R, L, H]"""
    if len(states) == num_rows and all(len(state) == row_len for state in states):
        return torch.stack([state for _, state in sorted(zip(places, states, strict=True), key=lambda pair: pair[0])])
    rows = states[0].new_zeros(num_rows, row_len, states[0].shape[1])
    for state, (row, column) in zip(states, places, strict=True):
        rows[row, column : column + len(state)] = state
    return rows
