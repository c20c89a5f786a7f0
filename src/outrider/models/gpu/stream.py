"""Data that the layers of one pass share, and the residual stream through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from outrider.models.attention.tree_tiles import KeySplit, Rows, Sights
from outrider.models.gpu.small_batch_matmul import PLAIN, Ending, NormParts
from outrider.models.gpu.sums import add_norm, added


@dataclass(frozen=True, eq=False)
class Step:
    """Data that all layers of one pass share. All rows have equally many nodes."""

    shape: tuple[int, int]
    rows: Rows
    sights: Sights
    cuts: Mapping[int, KeySplit]
    """Cuts of the keys for layers of each window; 0 is no window."""

    @property
    def num_nodes(self) -> int:
        """Nodes of all rows."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream, and the output of the last sublayer that the next norm adds to it."""

    x: Tensor
    parts: Tensor | None = None
    ending: Ending = PLAIN

    def normed(self, norm: NormParts | None) -> Tensor:
        """Adds the outstanding output to ``x``."""
        return add_norm(self.x, self.parts, norm, self.ending)

    def complete(self) -> Tensor:
        return added(self.x, self.parts, self.ending)

    def first(self, count: int) -> Stream:
        """The stream of the first nodes."""
        if count == len(self.x):
            return self
        parts = self.parts if self.parts is None else self.parts[..., :count, :].contiguous()
        return Stream(self.x[:count], parts, self.ending)

    def then(self, parts: Tensor, ending: Ending) -> Stream:
        return Stream(self.x, parts, ending)
