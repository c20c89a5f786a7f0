"""Work that a drafter did for the target's next pass: the first layers of the proposed nodes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Resume:
    """The target's first layers, already run by the drafter, so that the target need not run them again.

    Nodes 0 .. M - 1 of every tree have passed layers 0 .. ``layer`` - 1 exactly as in the target, and their keys and
    values of those layers are in the target's cache.
    """

    layer: int
    """Number of layers that were run; also the next layer to run."""
    hidden: Tensor
    """[B, M, H] input of layer ``layer``; M is at least 1."""

    @property
    def num_nodes(self) -> int:
        return self.hidden.shape[1]
