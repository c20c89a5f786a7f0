"""What a drafter proposes: a tree, and how its candidates were drawn.

An acceptance rule may only be exact for one way of drawing, so the way is part of the draft (Lemma A-C of docs/lossless.md).
The residual after a rejected *sampled* guess differs from that after a rejected *chosen* one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from outrider.core.resume import Resume
from outrider.core.tree import TokenTree


class Draws(Enum):
    """How the children of a node were drawn from the drafter's law q at that node."""

    IID = "iid"
    """Sampled independently from q, duplicates kept."""
    WITHOUT_REPLACEMENT = "without replacement"
    """Sampled one after the other, each from q without the earlier ones."""
    BEAM = "a stochastic beam"
    """Sampled without replacement, but how many siblings a node has depends on tokens in other branches: exact only for a
    rule that works from the top down."""
    DETERMINISTIC = "deterministic"
    """Chosen: top-k, copied, retrieved, guessed. Also guesses made with the target's own noise."""


class Shape(Enum):
    """What a drafter grows, or the most a rule can walk."""

    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, eq=False)
class Draft:
    """A batch of proposed trees."""

    tree: TokenTree
    draws: Draws
    q: Tensor | None = None
    """[B, N, V] row n is the law from which the children of node n were drawn; None when deterministic. When several
    drafters take turns it is [B, N, S, V] (``core/drafter_turns.py``)."""
    resume: Resume | None = None
    """The layers of the target that the drafter has already run, if any."""
    beliefs: Sequence[Sequence[float]] | None = None
    """The drafter's confidence in each guess of each row, in order. Given for chains whose plan has a ``doubt``."""

    @property
    def num_drafted(self) -> tuple[int, ...]:
        """Guesses per row: every node but the root."""
        return tuple(size - 1 for size in self.tree.sizes)
