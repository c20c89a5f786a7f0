"""What the target says of a tree: logits at every node, and the hidden states a drafter asked to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol, final

import torch
from torch import Tensor

from outrider.core.rng import Noise


class Chooser(Protocol):
    """The target's choices [B, N] where only temperatures shape the logits. ``depths`` [B, N] is None if every
    temperature is 0, which needs no noise."""

    def __call__(self, temperatures: Sequence[float], noise: Noise, depths: Tensor | None, /) -> Tensor: ...


@final
class Scores:
    """The result of one target pass over B trees of N nodes."""

    def __init__(
        self,
        logits: Tensor | Callable[[], Tensor],
        taps: Mapping[int, Tensor] | None = None,
        *,
        choose: Chooser | None = None,
    ) -> None:
        """``logits`` may be a function, called when they are first read. A target that computes logits in pieces
        passes one, and can ``choose`` without it."""
        self._logits = logits
        self.taps: Mapping[int, Tensor] = {} if taps is None else taps
        """[B, N, H] hidden states by layer: tap i is the residual stream entering layer i, tap L the last layer's output."""
        self.choose = choose

    @cached_property
    def logits(self) -> Tensor:
        """[B, N, V] raw logits of the token that would follow each node."""
        return self._logits() if callable(self._logits) else self._logits


@final
class StackedTaps(Mapping[int, Tensor]):
    """Taps in one tensor, split and converted when one is read. Most rounds of a paused drafter are never read, and
    on a small model each of these operations takes a percent of the round."""

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
