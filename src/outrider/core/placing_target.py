"""Targets that read tokens at positions the caller chooses, so that parts of a prompt can be left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from outrider.core.interfaces import Target


class PlacingTarget(Target, ABC):
    """A target that can read tokens at arbitrary positions."""

    has_windows: bool
    """Whether some layers use sliding-window attention. Where tokens were left out, the window reaches further back."""

    @abstractmethod
    def placed(self, positions: Sequence[int] | Tensor) -> Target:
        """The same weights, for rows whose first tokens have these positions. After them, the token in slot s has
        position s. Rotary positions may be negative, since scores depend on distances alone. A tensor [S, D / 2]
        gives each rotated pair of dimensions its own position, for models with several position axes.
        """
