"""Targets that can read tokens at positions of the caller's choice, so that a prompt can be read in part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from outrider.core.interfaces import Target


class PlacingTarget(Target, ABC):
    """A target whose tokens need not stand side by side."""

    has_windows: bool
    """Some layers see only a window of recent slots. Where tokens were left out, the window reaches further back."""

    @abstractmethod
    def placed(self, positions: Sequence[int] | Tensor) -> Target:
        """The same weights, for rows whose first tokens have these positions; the token in slot s behind them has position s.
        Rotary positions may be below 0: scores depend on the distances alone. A tensor [S, D / 2] gives every rotated pair of
        dimensions a position of its own, as models with several axes of positions need."""
