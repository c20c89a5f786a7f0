"""Where the children of a tree's nodes come from. The growers ask a source about one level after the other.

A source returns the children of the nodes that were expanded last (at first the root), and is told which of them to expand
next. Sources are the laws of a model or of heads (``DrawnChildren``, ``LikelyChildren``), a table of successors, and several
models that take turns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

from torch import Tensor

from outrider.core.draft import Draws
from outrider.core.interfaces import Context
from outrider.core.sampling import Law
from outrider.drafters.trees.candidates import Drawing, coupled_scores, log_chances, plain_scores
from outrider.drafters.trees.levels import LevelGrowth
from outrider.drafters.trees.options import BestFirstOptions


class Children(NamedTuple):
    """Candidates below M nodes, the first to propose first."""

    tokens: Tensor
    """[B, M, K]"""
    scores: Tensor
    """[B, M, K] the value of each; -inf where there is no candidate."""


class ChildSource(ABC):
    """Provides children for one level of a tree after the other."""

    context: Context
    draws: Draws = Draws.DETERMINISTIC
    runs_out: bool = False
    """Whether a node may have fewer children than asked for. The missing ones are left out of the tree."""

    @property
    @abstractmethod
    def num_expanded(self) -> int:
        """Nodes expanded so far, the root included."""

    @abstractmethod
    def children(self, count: int, *, depth: int, lanes: Tensor | None = None) -> Children:
        """At most ``count`` children of each of the M nodes expanded last, which are at ``depth``. Sampled children of
        node m use random numbers from ``lanes[m]`` on."""

    @abstractmethod
    def expand(self, tokens: Tensor, parents: Tensor) -> None:
        """Expand M new nodes [B, M]; ``parents`` are numbers of expanded nodes."""

    def q(self, level_nodes: Sequence[Sequence[int]], num_nodes: int) -> Tensor | None:
        """[B, N, ...] the laws of sampled children. ``level_nodes`` are the tree's expanded nodes, level by level. None
        for chosen children."""
        del level_nodes, num_nodes
        return None


@final
class DrawnChildren(ChildSource):
    """Children drawn from the law after each node, in one of the ways that acceptance rules know."""

    def __init__(self, growth: LevelGrowth, drawing: Drawing) -> None:
        self.context, self.draws = growth.context, drawing.draws
        self.runs_out = drawing.draws is Draws.WITHOUT_REPLACEMENT
        self._growth, self._drawing = growth, drawing
        self._law = growth.root()
        self._laws: list[Tensor] = []

    @property
    def num_expanded(self) -> int:
        return self._growth.num_expanded

    def children(self, count: int, *, depth: int, lanes: Tensor | None = None) -> Children:
        assert lanes is not None, "a shape has a range of random numbers for every node"
        if self.draws is not Draws.DETERMINISTIC:
            self._laws.append(self._law.probs)
        return Children(*self._drawing.children(self._law, self.context, count=count, depth=depth, lanes=lanes))

    def expand(self, tokens: Tensor, parents: Tensor) -> None:
        self._law = self._growth.expand(tokens, parents)

    def q(self, level_nodes: Sequence[Sequence[int]], num_nodes: int) -> Tensor | None:
        if self.draws is Draws.DETERMINISTIC:
            return None
        q = self._laws[0].new_zeros(self._laws[0].shape[0], num_nodes, self._laws[0].shape[2])
        for nodes, probs in zip(level_nodes, self._laws, strict=True):
            q[:, list(nodes)] = probs
        return q


@final
class LikelyChildren(ChildSource):
    """The likeliest children by the law after each node, with the log-probability that each is the target's choice."""

    def __init__(self, growth: LevelGrowth, options: BestFirstOptions) -> None:
        self.context = growth.context
        self._growth, self._options = growth, options
        self._law = growth.root()

    @property
    def num_expanded(self) -> int:
        return self._growth.num_expanded

    def chances(self, depth: int) -> Tensor:
        """[B, M, V] log-probability that each token is the target's choice after the M nodes expanded last."""
        return chances_of(self._law, self.context, options=self._options, depth=depth)

    def children(self, count: int, *, depth: int, lanes: Tensor | None = None) -> Children:
        del lanes
        chances = self.chances(depth)
        found = chances.topk(min(count, chances.shape[-1]), -1)
        return Children(found.indices, found.values)

    def expand(self, tokens: Tensor, parents: Tensor) -> None:
        self._law = self._growth.expand(tokens, parents)


def chances_of(law: Law, context: Context, *, options: BestFirstOptions, depth: int) -> Tensor:
    """[B, M, V] the draft's estimate of the log-probability that each token is the target's choice after nodes at
    ``depth``."""
    coupled = options.perturb or context.sampler.all_greedy
    scores = coupled_scores(law, context, depth=depth) if coupled else plain_scores(law, context)
    return log_chances(scores, options.tau if coupled else 1.0)
