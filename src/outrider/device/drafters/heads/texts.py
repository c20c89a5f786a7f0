"""Texts that heads read before their first round, many at a time: rows of different lengths with padding at the end.

The padding's keys and values are written after a text, where later columns overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.device_round import Texts
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.uploads import sent


def tapped_states(target: FastDecoder, texts: Texts, taps: Sequence[int]) -> Sequence[Tensor]:
    """[n, F] the states of all tokens of each row but the last, layer beside layer."""
    if texts.features is not None:
        return texts.features
    found = target.prefill([row[:-1] for row in texts.rows], target.new_cache(len(texts.rows)), taps=taps)
    return torch.cat([torch.cat(found[tap]) for tap in taps], -1).split([len(row) - 1 for row in texts.rows])


def padded_tokens(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[R, S] int64"""
    longest = max(map(len, rows))
    return sent([[*row, *[0] * (longest - len(row))] for row in rows], torch.int64, device)


def padded_part(values: Sequence[Tensor], first: int, count: int) -> Tensor:
    """[R, N, F] at most ``count`` of each row's values [n, F], starting at ``first``, with zeros after them."""
    parts = [value[first : first + count] for value in values]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
