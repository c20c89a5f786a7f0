"""Several drafters, one tree: their guesses are merged by longest common prefix, within one budget of nodes.

A retriever finds long copies; a draft model always has a guess. Their trees share a root and are merged like a trie, so equal
prefixes are stored once. Nodes go to the guesses that are expected to be accepted. The estimate comes from decaying statistics
of every drafter in the request (``source_rates.py``). Drafters that use least of their nodes are asked first, so nodes that
they leave go to the others.

Copying takes almost no time, so drafters that copy are asked first. The others are asked only for requests in which no copy was
found, and only if their first guess is likely enough. (Fusion: Quan et al. 2025, "RASD: Retrieval-Augmented Speculative
Decoding", arXiv 2503.03434; Miao et al. 2023, SpecInfer's merged trees, arXiv 2305.09781. The arbitration is our own.)

    places of i = how many of the largest chances, among i's and those of the drafters of its kind after it, are i's
    left <- left - new nodes of i

Guesses are chosen, not sampled: lossless under ``coupled`` and ``delta``. No inner guess is ever dropped, so every inner
drafter can be told what became of its own tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, RowState
from outrider.core.lasting_memory import LastingMemory
from outrider.core.method_rows import MethodRow, Parts, names_in
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.drafters.copying.copier import Copier
from outrider.drafters.mixed.source_rates import SourceRates, share
from outrider.drafters.trees.trie import Trie


@dataclass(frozen=True)
class SharingOptions:
    """How the drafters share the nodes of a tree."""

    trust_rounds: float = 30.0
    """Rounds over which a drafter's acceptance is averaged. More is steadier; fewer follows the text faster."""
    min_chance: float = 0.02
    """A guess less likely than this is left out, even if there is room."""
    min_first_chance: float = 0.25
    """A drafter that does not copy is asked where its first guess is at least this likely."""

    def __post_init__(self) -> None:
        if not self.trust_rounds > 1:
            raise OptionError(f"trust_rounds = {self.trust_rounds!r} is not valid; use a number above 1")
        for name, value in (("min_chance", self.min_chance), ("min_first_chance", self.min_first_chance)):
            if not 0 <= value < 1:
                raise OptionError(f"{name} = {value!r} is not valid; use a number from 0 to below 1")


@dataclass(frozen=True)
class HybridOptions:
    """Which drafters, and how they share the nodes of a tree."""

    parts: tuple[str, ...] | str = ("suffix", "draft-model")
    """Names of the methods whose guesses are fused; "suffix,draft-model" on the command line. Give their options beside
    this one; an option that several of them have goes to each."""
    trust_rounds: float = SharingOptions.trust_rounds
    """Rounds over which a drafter's acceptance is averaged."""
    min_chance: float = SharingOptions.min_chance
    """A guess less likely than this is left out."""
    min_first_chance: float = SharingOptions.min_first_chance
    """A part that does not copy is asked where its first guess is at least this likely."""

    @property
    def names(self) -> tuple[str, ...]:
        return names_in(self.parts)

    @property
    def sharing(self) -> SharingOptions:
        return SharingOptions(self.trust_rounds, self.min_chance, self.min_first_chance)

    def __post_init__(self) -> None:
        if len(set(self.names)) < max(1, len(self.names)):
            raise OptionError(f"parts = {self.parts!r} is not valid; name at least one method, each of them once")


@dataclass
class _Round:
    """One inner drafter's plan, and where its nodes went."""

    draft: Draft
    plan: Plan
    places: list[list[int]]
    """Index in the fused tree of each node of this part, row by row."""


@dataclass
class HybridState(RowState):
    """The inner drafters' states, and their acceptance in every row."""

    inner: list[Any]
    rates: list[list[SourceRates]]
    """[row][drafter]"""
    rounds: list[_Round | None] = field(default_factory=list)

    def fork(self, rows: Sequence[int]) -> HybridState:
        rates = [[source.copy() for source in self.rates[row]] for row in rows]
        return HybridState([state.fork(rows) for state in self.inner], rates)

    def join(self, other: HybridState) -> HybridState:
        inner = [mine.join(theirs) for mine, theirs in zip(self.inner, other.inner, strict=True)]
        return HybridState(inner, [*self.rates, *other.rates])


@final
class Hybrid(Drafter):
    """The union of several drafters' trees."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    waits: ClassVar = "every verdict decides what its parts draft next"
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC

    def __init__(self, drafters: Sequence[Drafter], options: SharingOptions | None = None) -> None:
        if not drafters:
            raise CompositionError("a hybrid needs drafters; name at least one")
        for drafter in drafters:
            if drafter.draws is not Draws.DETERMINISTIC:
                name = type(drafter).__name__
                raise CompositionError(f"{name} guesses {drafter.draws.value}; use parts whose guesses are chosen")
        self.drafters = tuple(drafters)
        self.options = options or SharingOptions()
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
        self.drafts_alone = all(drafter.drafts_alone for drafter in drafters)
        self._copies = [isinstance(drafter, Copier) for drafter in drafters]
        self.reads_logits = True  # each drafter is shown those of its own nodes

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return tuple(memory for drafter in self.drafters for memory in drafter.memories)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> HybridState:
        rates = [[SourceRates(self.options.trust_rounds) for _ in self.drafters] for _ in rows]
        return HybridState([drafter.start(rows, taps) for drafter in self.drafters], rates)

    def propose(self, state: HybridState, context: Context, plan: Plan) -> Draft:
        tries = [Trie(root) for root in context.roots]
        state.rounds = [None] * len(self.drafters)
        for kind in (True, False):
            waiting, is_open = self._order(state, copies=kind), [kind or not trie.num_guesses for trie in tries]
            while waiting:
                index, open_rows = waiting[0], zip(plan.max_nodes, tries, state.rates, is_open, strict=True)
                shares = [
                    self._places(budget - trie.num_guesses, [row[i] for i in waiting], copies=kind) if is_asked else 0
                    for budget, trie, row, is_asked in open_rows
                ]
                # Without the stop rule: what one drafter asked at a depth says nothing of the others' guesses there.
                asked = Plan(tuple(map(min, plan.max_depth, shares)), tuple(shares))
                draft = self.drafters[index].asked(state.inner[index], context, asked)
                places = [trie.add_tree(draft.tree, row) for row, trie in enumerate(tries)]
                state.rounds[index], waiting = _Round(draft, asked, places), waiting[1:]
        orders = [trie.breadth_first() for trie in tries]
        moved = [{node: place for place, node in enumerate(order)} for order in orders]
        for round_ in state.rounds:
            assert round_ is not None, "every drafter was asked"
            round_.places = [[places[node] for node in nodes] for places, nodes in zip(moved, round_.places, strict=True)]
        rows = [trie.row(order) for trie, order in zip(tries, orders, strict=True)]
        return Draft(TokenTree.of_rows(rows, context.device), self.draws)

    def round_taps(self, state: HybridState) -> tuple[int, ...]:
        wanted = (drafter.round_taps(inner) for drafter, inner in zip(self.drafters, state.inner, strict=True))
        return tuple(sorted({tap for taps in wanted for tap in taps}))

    def observe(self, state: HybridState, observation: Observation) -> None:
        if not state.rounds:  # nobody was asked
            for drafter, inner in zip(self.drafters, state.inner, strict=True):
                drafter.observe(inner, observation)
            return
        for index, (drafter, round_) in enumerate(zip(self.drafters, state.rounds, strict=True)):
            assert round_ is not None, "a round that was not proposed"
            seen = _own_view(observation, round_)
            for row, path in enumerate(seen.paths):
                made = round_.draft.num_drafted[row]
                state.rates[row][index].record(round_.plan.max_nodes[row], made, [node - 1 for node in path[1:]])
            drafter.observe(state.inner[index], seen)
        state.rounds = []

    def finish(self, state: HybridState, row: int, tokens: Sequence[int]) -> None:
        for drafter, inner in zip(self.drafters, state.inner, strict=True):
            drafter.finish(inner, row, tokens)

    def _order(self, state: HybridState, *, copies: bool) -> list[int]:
        """Order of the drafters that copy, or of the others. Those that use least of their nodes come first, so that the others
        get the rest."""
        fills = {i: sum(row[i].fill for row in state.rates) for i, is_copier in enumerate(self._copies) if is_copier is copies}
        return sorted(fills, key=fills.__getitem__)

    def _places(self, budget: int, waiting: Sequence[SourceRates], *, copies: bool) -> int:
        """How many guesses the first of the waiting drafters may make for a request."""
        if not copies and waiting[0].chances(1)[0] < self.options.min_first_chance:
            return 0
        return share(budget, waiting, min_chance=self.options.min_chance)


def _own_view(seen: Observation, round_: _Round) -> Observation:
    """The observation as the inner drafter would see it alone: its tree, its nodes' scores, its part of the path."""
    num_nodes = round_.draft.tree.num_nodes
    index = [[*places, *[0] * (num_nodes - len(places))] for places in round_.places]
    nodes = torch.tensor(index, device=seen.scores.logits.device)[..., None]

    def own(values: Tensor) -> Tensor:
        return values.gather(1, nodes.expand(-1, -1, values.shape[2]))

    scores = Scores(own(seen.scores.logits), {tap: own(states) for tap, states in seen.scores.taps.items()})
    paths = []
    for path, places in zip(seen.paths, round_.places, strict=True):
        mine = {place: node for node, place in enumerate(places)}
        paths.append([mine[place] for place in path if place in mine])
    accepted = [len(path) - 1 for path in paths]
    return Observation(
        round_.draft, scores, paths, accepted, seen.draft_seconds, seen.score_seconds, round_.plan, seen.round_seconds
    )


def build(parts: Parts) -> Drafter:
    options = parts.options
    return Hybrid([parts.drafter_of(name) for name in options.names], options.sharing)


ROW = MethodRow(
    summary="several drafters in one tree, places by their measured acceptance",
    paper="Quan et al. 2025, RASD's fusion (arXiv 2503.03434); the arbitration is our own",
    drafter=Hybrid,
    build=build,
    options=HybridOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 16},
    parts="parts",
)
