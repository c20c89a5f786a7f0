"""What the target says of a tree: logits at every node, and the hidden states a drafter asked to see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """The result of one target pass over B trees of N nodes."""

    logits: Tensor
    """[B, N, V] raw logits of the token that would follow each node."""
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    """[B, N, H] hidden states by layer: tap i is the residual stream entering layer i, tap L the last layer's output."""


@final
class StackedTaps(Mapping[int, Tensor]):
    """Taps in one tensor, cut and converted when one is looked at: most rounds of a drafter that pauses are never looked at,
    and on a small model each of these operations takes a percent of the round."""

    def __init__(self, taps: Sequence[int], states: Tensor, dtype: torch.dtype) -> None:
        """``states`` [taps, B, N, H]."""
        self._taps, self._states, self._dtype = taps, states, dtype

    def __getitem__(self, tap: int) -> Tensor:
        if tap not in self._taps:
            raise KeyError(tap)
        return self._states[self._taps.index(tap)].to(self._dtype)

    def __iter__(self) -> Iterator[int]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)
