"""Several draft models, one tree: the children of a node take turns, each guessed by another model.

Models that were trained differently err differently, so what the first one misses the second one often has. All of them read
the same tree and hang their guesses into it; a guess that an elder sibling made already is passed over, so no place is used
twice. (Miao et al. 2023, SpecInfer's merge of several small models' trees, arXiv 2305.09781; taking turns at every node,
with siblings that differ, is ours.)

    child i of node u:   first of   log q_s(. | u) + noise   that no elder child is,     s = i mod (number of models)
    coupled: the noise is the target's at that position;    sampled: x_i ~ norm(q_s without the elder children)

A model is asked about a level only if one of its children is in it; the first model alone draws where nodes have one child.
Lossless: under ``coupled`` and ``delta`` as any chosen tree, under ``recursive`` by Corollary B in docs/lossless.md: the law a
guess is tested against may differ from sibling to sibling, as long as it is the law that guess was drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.sampling import Law
from outrider.core.table import MethodRow, Parts
from outrider.drafters.model.catch_up import room
from outrider.drafters.model.draft_tree import DraftTreeOptions
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.levels import TreeGrowth, kept_part
from outrider.drafters.trees.shape import TreeShape, union


@dataclass
class MultiDraftState(RowState):
    """The models' caches, and where this round's proposed nodes stand in them."""

    caches: list[Cache]
    numbers: list[list[int]] | None = None
    """Of each proposed node among the expanded ones, 0 where it is none."""
    num_expanded: Sequence[int] = ()
    """Nodes that each model was fed, the root included: those with smaller numbers."""

    def fork(self, rows: Sequence[int]) -> MultiDraftState:
        return MultiDraftState([cache.fork(rows) for cache in self.caches])

    def join(self, other: MultiDraftState) -> MultiDraftState:
        return MultiDraftState([mine.join(theirs) for mine, theirs in zip(self.caches, other.caches, strict=True)])


@final
class MultiDraft(Drafter):
    """Trees of one shape whose siblings come from different models."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.BEAM)
    """BEAM: without replacement, for rules that test siblings one by one from the top down."""
    shape: ClassVar = Shape.TREE

    def __init__(
        self,
        models: Sequence[Target],
        options: DraftTreeOptions | None = None,
        *,
        vocab_size: int,
        draws: Draws = Draws.DETERMINISTIC,
    ) -> None:
        if not models:
            raise CompositionError("MultiDraft needs draft models; give at least one")
        options = options or DraftTreeOptions()
        self.models, self.vocab_size, self.draws = tuple(models), vocab_size, draws
        self.tree = options.tree
        self._drawing = Drawing(draws, options.perturb)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> MultiDraftState:
        del taps
        return MultiDraftState([model.new_cache(len(rows)) for model in self.models])

    def propose(self, state: MultiDraftState, context: Context, plan: Plan) -> Draft:
        limits = list(zip(context.tokens, map(min, plan.max_depth, plan.max_nodes), strict=True))
        depths = [min(room(model, tokens, depth) for model in self.models) for tokens, depth in limits]
        state.numbers = None
        if not any(depths):
            return context.without_guesses(self.draws)
        nodes = [n if d else 0 for n, d in zip(plan.max_nodes, depths, strict=True)]
        whole, wanted = union([self.tree.within(n, d) for n, d in zip(nodes, depths, strict=True)])
        growths = [
            TreeGrowth(model, cache, context, vocab_size=self.vocab_size, depths=depths)
            for model, cache in zip(self.models, state.caches, strict=True)
        ]
        levels = _Levels(growths, whole, self._drawing, lanes=self.tree)
        draft, numbers = levels.draft(None if wanted is None else torch.tensor(wanted, device=context.device))
        state.numbers, state.num_expanded = numbers.tolist(), [growth.num_expanded for growth in growths]
        return draft

    def observe(self, state: MultiDraftState, observation: Observation) -> None:
        """Keep the accepted guesses that each model was fed; the next round reads the others."""
        if state.numbers is None:
            return
        rows = list(zip(state.numbers, observation.paths, strict=True))
        for cache, fed in zip(state.caches, state.num_expanded, strict=True):
            if fed > 1:
                cache.commit([[row[node] - 1 for node in path[1:] if 0 < row[node] < fed] for row, path in rows])
        state.numbers = None


class _Levels:
    """The tree while it grows, level by level."""

    def __init__(self, growths: Sequence[TreeGrowth], shape: TreeShape, drawing: Drawing, *, lanes: TreeShape) -> None:
        self.growths, self.shape, self.drawing, self.lanes = growths, shape, drawing, lanes.lanes
        self.context = growths[0].context
        self.turns = len(growths)
        self.tokens = torch.tensor(self.context.roots, device=self.context.device)[:, None]
        self.possible = torch.ones_like(self.tokens, dtype=torch.bool)
        self.numbers = [0] * len(shape.paths)
        self.laws: list[tuple[list[int], int, Tensor]] = []
        """(nodes, model, [B, M, V] its law after them) of sampled guesses."""
        self._grow()

    def _grow(self) -> None:
        shape, inner = self.shape, [0]
        laws: list[Law | None] = [growth.root() if self._draws(s, 0) else None for s, growth in enumerate(self.growths)]
        for depth in range(shape.max_depth):
            level = [node for node, path in enumerate(shape.paths) if len(path) == depth + 1]
            index = {node: place for place, node in enumerate(inner)}
            tokens, possible = self._children(laws, inner, depth)
            places, ranks = [index[shape.parents[node]] for node in level], [shape.paths[node][-1] for node in level]
            above = self.possible[:, [shape.parents[node] for node in level]]
            self.tokens = torch.cat([self.tokens, tokens[:, places, ranks]], 1)
            self.possible = torch.cat([self.possible, possible[:, places, ranks] & above], 1)
            inner = [node for node in level if shape.widths[node]]
            if inner:
                laws = self._expand(inner, depth + 1)

    def _draws(self, model: int, depth: int) -> bool:
        """A child of a node at ``depth`` or below comes from this model, so it must know the nodes on the way."""
        shape = self.shape
        return any(path[-1] % self.turns == model for path in shape.paths if len(path) > depth)

    def _expand(self, inner: Sequence[int], depth: int) -> list[Law | None]:
        """Ask the models that still draw about the nodes that have children."""
        shape, device = self.shape, self.tokens.device
        parents = torch.tensor([self.numbers[shape.parents[node]] for node in inner], device=device)
        first = 1 + sum(number > 0 for number in self.numbers)
        for place, node in enumerate(inner):
            self.numbers[node] = first + place
        tokens = self.tokens[:, list(inner)]
        return [
            growth.expand(tokens, parents.expand(len(tokens), -1)) if self._draws(s, depth) else None
            for s, growth in enumerate(self.growths)
        ]

    def _children(self, laws: Sequence[Law | None], inner: Sequence[int], depth: int) -> tuple[Tensor, Tensor]:
        """[B, M, K] the children of the inner nodes in order, and whether there was something left to draw."""
        shape, width = self.shape, max(self.shape.widths[node] for node in inner)
        scores: dict[int, Tensor] = {}
        for model, law in enumerate(laws):
            if law is not None:
                lanes = torch.tensor([self.lanes[shape.paths[node]] + model for node in inner], device=self.tokens.device)
                scores[model] = self.drawing.scores(law, self.context, depth=depth, lanes=lanes).clone()
                if self.drawing.draws is not Draws.DETERMINISTIC:
                    self.laws.append((list(inner), model, law.probs))
        found: list[Tensor] = []
        left: list[Tensor] = []
        for rank in range(width):
            best = scores[rank % self.turns].max(-1, keepdim=True)
            possible = best.values > -torch.inf
            found.append(best.indices)
            left.append(possible & left[-1] if left else possible)  # whose turn it is depends on the elders: none is skipped
            for mine in scores.values():
                mine.scatter_(-1, best.indices, -torch.inf)
        return torch.cat(found, -1), torch.cat(left, -1)

    def draft(self, wanted: Tensor | None) -> tuple[Draft, Tensor]:
        """The tree of the wanted nodes that could be drawn, and its nodes' numbers among the expanded ones."""
        kept = self.possible if wanted is None else self.possible & wanted
        parents = torch.tensor(self.shape.parents, device=kept.device).expand_as(self.tokens)
        tree, origin = kept_part(self.tokens, parents, kept)
        numbers = torch.tensor(self.numbers, device=kept.device).expand_as(self.tokens).gather(1, origin)
        draws = self.drawing.draws
        if draws is Draws.DETERMINISTIC:
            return Draft(tree, draws), numbers
        q = self._laws()
        q = q.gather(1, origin[..., None, None].expand(-1, -1, *q.shape[2:]))
        return Draft(tree, draws, q), numbers

    def _laws(self) -> Tensor:
        """[B, N, S, V] what each model says after every node it was asked about; zero elsewhere."""
        first = self.laws[0][2]
        q = first.new_zeros(first.shape[0], self.tokens.shape[1], self.turns, first.shape[2])
        for nodes, model, probs in self.laws:
            q[:, nodes, model] = probs
        return q


def build(parts: Parts) -> Drafter:
    return MultiDraft(parts.drafts, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="several draft models take turns in one tree",
    paper="Miao et al. 2023, SpecInfer (arXiv 2305.09781)",
    drafter=MultiDraft,
    build=build,
    options=DraftTreeOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
