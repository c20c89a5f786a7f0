"""Positions with three axes: time, height and width (multimodal rotary positions of Qwen2-VL, arXiv 2409.12191).

Text counts one position a token, the same on all axes. All positions of an image have the same time, and the height and width
of their patch. Text after an image continues after its longer side. Each axis rotates some of a head's dimensions.

    text after position P        (P, P, P), (P + 1, P + 1, P + 1), ...
    image of h x w places        (P, P + i, P + j);  what follows is at P + max(h, w)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """An image in a prompt: its first position, and its rows and columns of positions."""

    begin: int
    height: int
    width: int

    @property
    def end(self) -> int:
        return self.begin + self.height * self.width


def axis_positions(spans: Sequence[Span]) -> tuple[Tensor, int]:
    """[3, N] positions of a prompt up to the end of its last image, and the position after it."""
    pieces, place, position = [], 0, 0
    for span in spans:
        num_text = span.begin - place
        pieces.append((torch.arange(num_text) + position).expand(3, -1))
        position += num_text
        rows, columns = torch.meshgrid(torch.arange(span.height), torch.arange(span.width), indexing="ij")
        pieces.append(torch.stack((torch.zeros_like(rows), rows, columns)).flatten(1) + position)
        place, position = span.end, position + max(span.height, span.width)
    return torch.cat(pieces, 1), position


def turned_positions(spans: Sequence[Span], sections: Sequence[int]) -> Tensor:
    """[N, D / 2] the position of every pair of dimensions. All are shifted so that the first token after the image has its own
    index as position. ``sections`` counts the pairs that each axis rotates."""
    positions, following = axis_positions(spans)
    axes = torch.arange(len(sections)).remainder(3).repeat_interleave(torch.tensor(sections))
    return (positions[axes] + positions.shape[1] - following).T.float()
