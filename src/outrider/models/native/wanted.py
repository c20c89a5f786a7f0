"""What a call of the native pass is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.route import Route


@dataclass(frozen=True, eq=False, kw_only=True)
class Wanted:
    """What one call computes, and what it gives back."""

    first: int = 0
    last: int
    logits: bool = False
    hidden: Tensor | None = None
    """[B, N, H] float32: read when the pass begins above the first layer, written when it ends."""
    taps: Sequence[int] = ()
    route: Route | None = None
    spoken: tuple[int, int] = (0, 0)
    """Rows of the batch that have logits, and the nodes of each; (0, 0) for all."""
