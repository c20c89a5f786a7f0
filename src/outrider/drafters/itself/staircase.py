"""A chain whose nodes have passed different numbers of the target's first layers.

A node may exit after any layer. When a later node goes deeper, it needs the keys and values of the earlier nodes there. So
earlier nodes at the same depth go deeper with it, in the same pass. Earlier nodes are therefore at least as deep as later ones.
Every layer runs once for every node: the verifying pass runs the layers that drafting left out.

    depths d_0 >= d_1 >= ... >= d_n;      climb(e): while d_n < e, all nodes at d_n go up to min(e, the depth before them)
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache
from outrider.core.layered_target import LayeredTarget
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.tree import TokenTree


@final
class Staircase:
    """The nodes of one round's chains, on the target's cache."""

    def __init__(self, target: LayeredTarget, cache: Cache) -> None:
        self._target, self._cache = target, cache
        self._states: list[Tensor] = []
        self.depths: list[int] = []
        """Number of layers that each node has passed."""

    def add(self) -> None:
        """Add a node, which has passed no layer yet."""
        self._states.append(torch.empty(0))
        self.depths.append(0)

    def climb(self, chain: TokenTree, layer: int) -> Tensor:
        """[B, 1, H] states of the newest node after at least ``layer`` layers; ``chain`` holds all nodes."""
        while self.depths[-1] < layer:
            start = self.depths.index(self.depths[-1])
            self._lift(chain, start, layer if start == 0 else min(layer, self.depths[start - 1]))
        return self._states[-1]

    def resume(self, chain: TokenTree) -> Resume:
        """All nodes at the depth of the first one, from which the verifying pass goes on."""
        self.climb(chain, self.depths[0])
        return Resume(self.depths[0], torch.cat(self._states, 1))

    def _lift(self, chain: TokenTree, start: int, layer: int) -> None:
        """Move the nodes from ``start`` on, which are at one depth, up to ``layer``."""
        level, route = self.depths[start], Route.first(layer, self._target.num_layers)
        begun = Resume(level, torch.cat(self._states[start:], 1)) if level else None
        hidden = self._target.exit(chain, self._cache, route=route, start=start, begun=begun)
        self._states[start:] = hidden.split(1, 1)
        self.depths[start:] = [layer] * hidden.shape[1]
