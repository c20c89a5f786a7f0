"""Work that a drafter did for the target's next pass: the first layers of the proposed nodes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Resume:
    """What a drafter that runs the target's own first layers hands on, so that nobody runs them twice.

    Nodes 0 .. M - 1 of every tree have been through layers 0 .. ``layer`` - 1 exactly as the target would take them, and
    their keys and values of those layers are in the target's cache.
    """

    layer: int
    """Layers that were run; the next one to run."""
    hidden: Tensor
    """[B, M, H] what enters layer ``layer``; M is at least 1."""

    @property
    def num_nodes(self) -> int:
        return self.hidden.shape[1]
