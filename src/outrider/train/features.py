"""From documents to packed rows with the target's states: computed when needed, never stored.

Every document goes through the target alone (a prefill with taps, which any target has), so its states are exactly those it
will have when it is generated; then documents are laid end to end in rows, so that little is padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.interfaces import Target
from outrider.models.heads import Packed
from outrider.train.data import Document


def places_of(lengths: Sequence[int], row_len: int) -> list[tuple[int, int]]:
    """(row, column) of every document: longest first, into the first row with room."""
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
    """Tapped states [len, H] of every document, the last layer's output among them."""
    wanted = sorted({*taps, target.num_layers})
    found = target.prefill([document.tokens for document in documents], target.new_cache(len(documents)), taps=wanted)
    return {tap: list(found[tap]) for tap in wanted}


def pack(
    states: dict[int, list[Tensor]], documents: Sequence[Document], taps: Sequence[int], *, row_len: int, last: int
) -> Packed:
    """The documents in rows, with the states of ``taps`` side by side; ``last`` is the tap of the last layer's output."""
    lengths = [len(document.tokens) for document in documents]
    row_len = max(row_len, *lengths)
    places = places_of(lengths, row_len)
    num_rows, device = 1 + max(row for row, _ in places), states[last][0].device
    if num_rows == len(documents) and min(lengths) == row_len:  # nothing to pack
        places = [(index, 0) for index in range(num_rows)]
    tokens = torch.zeros(num_rows, row_len, dtype=torch.int64)
    segments, positions = torch.full_like(tokens, -1), torch.zeros_like(tokens)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    for index, (document, (row, column)) in enumerate(zip(documents, places, strict=True)):
        end = column + lengths[index]
        tokens[row, column:end] = torch.tensor(document.tokens)
        segments[row, column:end] = index
        positions[row, column:end] = torch.arange(lengths[index])
        supervised[row, column + document.begin : end] = True
    on = [tensor.to(device) for tensor in (tokens, segments, positions, supervised)]
    laid = {tap: _laid(states[tap], places, num_rows, row_len) for tap in {*taps, last}}
    features = torch.cat([laid[tap] for tap in taps], -1)
    return Packed(on[0], features, laid[last], on[1], on[2], on[3])


def _laid(states: Sequence[Tensor], places: Sequence[tuple[int, int]], num_rows: int, row_len: int) -> Tensor:
    """[R, L, H]"""
    if all(len(state) == row_len for state in states):
        return torch.stack(list(states))
    rows = states[0].new_zeros(num_rows, row_len, states[0].shape[1])
    for state, (row, column) in zip(states, places, strict=True):
        rows[row, column : column + len(state)] = state
    return rows
