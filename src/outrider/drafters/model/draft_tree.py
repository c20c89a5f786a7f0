"""Trees from a draft model: what its shapes have in common, and the simplest of them, a shape fixed in advance.

A chain stops at its first wrong guess; a tree also holds the second and third best tokens, so that a wrong first guess is
often caught by its sibling. All children of a level come from one pass of the draft model. How the children of a node are
drawn follows from the acceptance rule: *coupled* (top-k of log q + the target's noise) for the coupled rule, without
replacement for recursive rejection and traversal, independent for k-SEQ. Fixed branching with independent children is
SpecInfer's expansion (Miao et al. 2023, arXiv 2305.09781), without replacement RSD-C (Jeon et al. 2024, arXiv 2402.14160).

    children(u) = first branching[depth(u)] of   log q(. | u) + g_position          coupled: deterministic, given the seed
                                                 log q(. | u) + Gumbel noise        without replacement, in draw order

Lossless under every rule that is exact for the draws; coupled: same seed, same text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.table import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.model.catch_up import room
from outrider.drafters.trees.candidates import Drawing
from outrider.drafters.trees.levels import LevelGrowth, TreeGrowth, kept_part
from outrider.drafters.trees.shape import RankPath, TreeShape, union


@dataclass
class TreeState(RowState):
    """The draft model's cache, and where this round's proposed nodes stand in it."""

    cache: Cache
    slots: Tensor | None = None
    """[B, N] number of each proposed node in the draft's forest, -1 where it was not fed."""

    def fork(self, rows: Sequence[int]) -> TreeState:
        return TreeState(self.cache.fork(rows))

    def narrow(self, rows: Sequence[int]) -> TreeState:
        return TreeState(self.cache.narrow(rows))

    def join(self, other: TreeState) -> TreeState:
        return TreeState(self.cache.join(other.cache))


class TreeDrafter(Drafter, ABC):
    """A draft model with a way of growing trees."""

    shape: ClassVar = Shape.TREE

    def __init__(self, model: Target, *, vocab_size: int, draws: Draws) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.draws = draws

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> TreeState:
        del taps
        return TreeState(self.model.new_cache(len(rows)))

    def propose(self, state: TreeState, context: Context, plan: Plan) -> Draft:
        limits = zip(context.tokens, plan.max_depth, plan.max_nodes, strict=True)
        depths = [room(self.model, tokens, min(depth, nodes)) for tokens, depth, nodes in limits]
        if not any(depths):
            return context.without_guesses(self.draws)
        plan = Plan(tuple(depths), tuple(n if d else 0 for n, d in zip(plan.max_nodes, depths, strict=True)))
        guessed = self._guessed(state, context, plan)
        if guessed is not None:
            tree, expanded = guessed
            state.slots = expanded - 1
            return Draft(tree, self.draws)
        growth = TreeGrowth(self.model, state.cache, context, vocab_size=self.vocab_size, depths=depths)
        draft, expanded = self._grow(growth, plan)
        if min(depths) != max(depths):  # the deepest guesses of a short row were fed only to keep its neighbours company
            leaves = draft.tree.depths >= torch.tensor(depths, device=context.device)[:, None]
            expanded = expanded.masked_fill(leaves, 0)
        state.slots = expanded - 1 if growth.num_expanded > 1 else None  # the root is not in the forest
        return draft

    def _guessed(self, state: TreeState, context: Context, plan: Plan) -> tuple[TokenTree, Tensor] | None:
        """The tree in one call, and its nodes' numbers, where the model can run ahead by itself; None for level by level."""
        del state, context, plan
        return None

    def observe(self, state: TreeState, observation: Observation) -> None:
        """Keep the accepted guesses that were fed; the next round reads the others."""
        if state.slots is not None:
            slots = state.slots.tolist()
            kept = [[row[node] for node in path[1:] if row[node] >= 0] for row, path in zip(slots, observation.paths)]
            state.cache.commit(kept)
            state.slots = None

    @abstractmethod
    def _grow(self, growth: TreeGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        """A draft within the plan, and [B, N] the number of each of its nodes in ``growth``, 0 where it has none."""


@dataclass(frozen=True)
class DraftTreeOptions:
    """The shape. The policy's ``num_draft_tokens`` (depth) and ``num_tree_nodes`` can only cut it."""

    branching: tuple[int, ...] | str = (4, 2, 2, 1, 1)
    """Children of every node, level by level; "4,2,2,1,1" on the command line."""
    rank_paths: tuple[RankPath, ...] | None = None
    """Any other shape: rank paths such as ((0,), (1,), (0, 0)); overrides ``branching``."""

    perturb: bool = True
    """Rank chosen candidates with the target's noise, as the coupled rule chooses; turn off for rule ``delta``."""

    @property
    def tree(self) -> TreeShape:
        return (
            TreeShape.of_branching(_widths(self.branching)) if self.rank_paths is None else TreeShape.of_paths(self.rank_paths)
        )

    def __post_init__(self) -> None:
        assert self.tree  # raises where it is not a tree


def _widths(branching: tuple[int, ...] | str) -> tuple[int, ...]:
    if not isinstance(branching, str):
        return branching
    try:
        return tuple(int(width) for width in branching.split(","))
    except ValueError:
        raise OptionError(f"branching = {branching!r} is not valid; write whole numbers with commas between them") from None


@final
class DraftTree(TreeDrafter):
    """Trees of one shape."""

    offers: ClassVar = (Draws.DETERMINISTIC, Draws.WITHOUT_REPLACEMENT, Draws.IID)

    def __init__(
        self, model: Target, options: DraftTreeOptions | None = None, *, vocab_size: int, draws: Draws = Draws.DETERMINISTIC
    ) -> None:
        super().__init__(model, vocab_size=vocab_size, draws=draws)
        options = options or DraftTreeOptions()
        self.tree = options.tree
        self.drawing = Drawing(draws, options.perturb)

    def _grow(self, growth: TreeGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        return grow_shape(growth, plan, tree=self.tree, drawing=self.drawing)


def grow_shape(growth: LevelGrowth, plan: Plan, *, tree: TreeShape, drawing: Drawing) -> tuple[Draft, Tensor]:
    """Trees of the given shape, cut to every row's plan."""
    limits = zip(plan.max_nodes, plan.max_depth, strict=True)
    whole, wanted = union([tree.within(nodes, depth) for nodes, depth in limits])
    levels = _Levels(growth, whole, drawing, lanes=tree.lanes)
    while levels.depth < whole.max_depth:
        levels.add()
    return levels.draft(None if wanted is None else torch.tensor(wanted, device=levels.tokens.device))


class _Levels:
    """A static tree while it grows."""

    def __init__(self, growth: LevelGrowth, shape: TreeShape, drawing: Drawing, *, lanes: Mapping[RankPath, int]) -> None:
        self.growth, self.shape, self.drawing, self.lanes = growth, shape, drawing, lanes
        self.depth = 0
        self.law = growth.root()
        self.tokens = torch.tensor(growth.context.roots, device=growth.context.device)[:, None]
        self.possible = torch.ones_like(self.tokens, dtype=torch.bool)
        self.inner = [0]
        """Nodes of the last level that have children: those ``law`` is about."""
        self.number = [0] * len(shape.paths)
        """Of each node among the expanded ones."""
        self.laws: list[tuple[list[int], Tensor]] = []

    def add(self) -> None:
        """The next level: choose its tokens, and ask the draft model about those that have children."""
        shape, index = self.shape, {node: place for place, node in enumerate(self.inner)}
        if self.drawing.draws is not Draws.DETERMINISTIC:
            self.laws.append((self.inner, self.law.probs))
        level = [node for node, path in enumerate(shape.paths) if len(path) == self.depth + 1]
        width = max(shape.widths[node] for node in self.inner)
        lanes = torch.tensor([self.lanes[shape.paths[node]] for node in self.inner], device=self.tokens.device)
        context = self.growth.context
        tokens, possible = self.drawing.children(self.law, context, count=width, depth=self.depth, lanes=lanes)
        places = [index[shape.parents[node]] for node in level]
        ranks = [min(shape.paths[node][-1], tokens.shape[2] - 1) for node in level]
        chosen, fine = tokens[:, places, ranks], possible[:, places, ranks]
        fine = fine & self.possible[:, [shape.parents[node] for node in level]]
        self.tokens, self.possible = torch.cat([self.tokens, chosen], 1), torch.cat([self.possible, fine], 1)
        self.depth += 1
        self.inner = [node for node in level if shape.widths[node]]
        if self.inner:
            parents = torch.tensor([self.number[shape.parents[node]] for node in self.inner], device=chosen.device)
            for place, node in enumerate(self.inner):
                self.number[node] = self.growth.num_expanded + place
            columns = [node - level[0] for node in self.inner]
            self.law = self.growth.expand(chosen[:, columns], parents.expand(len(chosen), -1))

    def draft(self, wanted: Tensor | None) -> tuple[Draft, Tensor]:
        """The tree of the wanted nodes that could be drawn, with their laws, and its nodes' numbers."""
        device, tokens = self.tokens.device, self.tokens
        parents = torch.tensor(self.shape.parents, device=device).expand_as(tokens)
        number = torch.tensor(self.number, device=device).expand_as(tokens)
        draws = self.drawing.draws
        q = None if draws is Draws.DETERMINISTIC else _laws(self.laws, tokens.shape[1])
        if draws is Draws.WITHOUT_REPLACEMENT:
            wanted = self.possible if wanted is None else self.possible & wanted
        if wanted is None:
            tree = TokenTree(tokens, parents, (tokens.shape[1],) * len(tokens), is_chain=self.shape.is_chain)
            return Draft(tree, draws, q), number
        tree, origin = kept_part(tokens, parents, wanted)
        if q is not None:
            q = q.gather(1, origin[..., None].expand(-1, -1, q.shape[2]))
        return Draft(tree, draws, q), number.gather(1, origin)


def _laws(laws: Sequence[tuple[list[int], Tensor]], num_nodes: int) -> Tensor:
    """[B, N, V] the law at every node that has children; zero elsewhere."""
    first = laws[0][1]
    q = first.new_zeros(first.shape[0], num_nodes, first.shape[2])
    for nodes, probs in laws:
        q[:, nodes] = probs
    return q


def build(parts: Parts) -> Drafter:
    return DraftTree(parts.draft_model, parts.options, vocab_size=parts.target.vocab_size, draws=parts.draws)


ROW = MethodRow(
    summary="a draft model guesses a tree of fixed branching",
    paper="Miao et al. 2023, SpecInfer (arXiv 2305.09781); Jeon et al. 2024, RSD-C (arXiv 2402.14160)",
    drafter=DraftTree,
    build=build,
    options=DraftTreeOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
