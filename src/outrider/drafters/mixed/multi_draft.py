"""Several draft models, one tree: the children of a node take turns, each guessed by another model.

Models that were trained differently make different mistakes, so the second often has the token that the first one lacks. All of
them extend the same tree. A guess that an elder sibling already made is skipped, so no node is used twice. (Miao et al. 2023,
SpecInfer's merge of several small models' trees, arXiv 2305.09781; taking turns at every node, with siblings that differ, is
ours.)

    child i of node u:   first of   log q_s(. | u) + noise   that no elder child is,     s = i mod (number of models)
    coupled: the noise is the target's at that position;    sampled: x_i ~ norm(q_s without the elder children)

A model is asked about a level only if one of its children is in it; the first model alone draws where nodes have one child.
Lossless: under ``coupled`` and ``delta`` as any chosen tree, under ``recursive`` by Corollary B in docs/lossless.md. The law
that a guess is tested against may differ from sibling to sibling, as long as it is the law that guess was drawn from.
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
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.sampling import Law
from outrider.drafters.model.catch_up import cut_back, room
from outrider.drafters.model.draft_growth import DraftGrowth
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.children import Children, ChildSource
from outrider.drafters.trees.options import DraftTreeOptions
from outrider.drafters.trees.shape import TreeShape, union
from outrider.drafters.trees.static import cut, grow_shapes


@dataclass
class MultiDraftState(RowState):
    """The models' caches, and the places of this round's nodes in them."""

    caches: list[Cache]
    numbers: list[list[int]] | None = None
    """Number of each proposed node among the expanded nodes; 0 for a node that was not expanded."""
    num_expanded: Sequence[int] = ()
    """Number of nodes that each model was fed, the root included; those are the nodes with smaller numbers."""

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
    waits: ClassVar = ""
    drafts_alone = True

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
        shapes = cut(self.tree, Plan(tuple(depths), tuple(nodes)))
        growths = [
            DraftGrowth(model, cache, context, vocab_size=self.vocab_size, depths=depths)
            for model, cache in zip(self.models, state.caches, strict=True)
        ]
        source = _Turns(growths, self._drawing, union(shapes)[0])
        draft, numbers = grow_shapes(source, shapes, lanes=self.tree.lanes)
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

    def rewind(self, state: MultiDraftState, lengths: Sequence[int]) -> None:
        for cache in state.caches:
            cut_back(cache, lengths)


@final
class _Turns(ChildSource):
    """Children that the models guess in turn. A model is run while one of the children below is its own."""

    runs_out = True

    def __init__(self, growths: Sequence[DraftGrowth], drawing: Drawing, shape: TreeShape) -> None:
        self.context, self.draws = growths[0].context, drawing.draws
        self._growths, self._drawing = growths, drawing
        self._last_levels = [_last_level(shape, model, len(growths)) for model in range(len(growths))]
        self._num_expanded, self._depth = 1, 0
        self._laws: list[Law | None] = [growth.root() if self._draws(s) else None for s, growth in enumerate(growths)]
        self._drawn: list[dict[int, Tensor]] = []
        """[B, M, V] by model, level by level: the laws of sampled guesses."""

    @property
    def num_expanded(self) -> int:
        return self._num_expanded

    def expand(self, tokens: Tensor, parents: Tensor) -> None:
        self._num_expanded += tokens.shape[1]
        self._depth += 1
        growths = enumerate(self._growths)
        self._laws = [growth.expand(tokens, parents) if self._draws(s) else None for s, growth in growths]

    def children(self, count: int, *, depth: int, lanes: Tensor | None = None) -> Children:
        assert lanes is not None, "a shape has a range of random numbers for every node"
        asked = {model: law for model, law in enumerate(self._laws) if law is not None}
        if self.draws is not Draws.DETERMINISTIC:
            self._drawn.append({model: law.probs for model, law in asked.items()})
        scores = {
            model: self._drawing.scores(law, self.context, depth=depth, lanes=lanes + model).clone()
            for model, law in asked.items()
        }
        found: list[Tensor] = []
        worth: list[Tensor] = []
        for rank in range(count):
            best = scores[rank % len(self._growths)].max(-1, keepdim=True)
            found.append(best.indices)
            # Whose turn it is depends on the elders, so none is skipped: where one has nothing left, neither have the younger.
            worth.append(best.values.masked_fill(worth[-1] == -torch.inf, -torch.inf) if worth else best.values)
            for mine in scores.values():
                mine.scatter_(-1, best.indices, -torch.inf)
        return Children(torch.cat(found, -1), torch.cat(worth, -1))

    def q(self, level_nodes: Sequence[Sequence[int]], num_nodes: int) -> Tensor | None:
        """[B, N, S, V] each model's law after every node it was run on; zero elsewhere."""
        if self.draws is Draws.DETERMINISTIC:
            return None
        first = next(iter(self._drawn[0].values()))
        q = first.new_zeros(first.shape[0], num_nodes, len(self._growths), first.shape[2])
        for nodes, laws in zip(level_nodes, self._drawn, strict=True):
            for model, probs in laws.items():
                q[:, list(nodes), model] = probs
        return q

    def _draws(self, model: int) -> bool:
        """Whether this model guesses a child at or below the newest nodes, so that it must read them."""
        return self._depth < self._last_levels[model]


def _last_level(shape: TreeShape, model: int, num_models: int) -> int:
    """The deepest level with a child from this model; 0 if there is none."""
    return max((len(path) for path in shape.paths[1:] if path[-1] % num_models == model), default=0)


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
