"""RASD: retrieved continuations are pruned by the draft model and merged with its own tree.

A retriever finds long continuations but does not know which of them fits. A draft model knows the next token but needs a pass
for every further one. So the draft model's first step, which it takes anyway, shows which retrieved continuations begin with a
likely token; the others are dropped. The rest is merged into the draft's best-first tree by longest common prefix. So equal
prefixes cost one node, and long retrieved continuations go deeper than the draft model's own tree. (Quan et al. 2025, "RASD:
Retrieval-Augmented Speculative Decoding", arXiv 2503.03434; how deep retrieved tokens are trusted is measured per request
here.)

    chance(retrieved x_1 .. x_d) = P_draft(x_1) * hold_d,   dropped where P_draft(x_1) < min_chance
    hold_d: how often d retrieved tokens held when the first did         chance(node) = the larger, where both have it
    the tree: the max_nodes largest chances of both                      (a child's is never above its parent's)

Guesses are chosen and pruned, never sampled: lossless under ``coupled`` (same seed, same text) and ``delta``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.lasting_memory import LastingMemory
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.mixed.source_rates import SourceRates
from outrider.drafters.model.catch_up import room
from outrider.drafters.model.draft_growth import DraftGrowth
from outrider.drafters.trees.best_first import grow_pool
from outrider.drafters.trees.children import LikelyChildren
from outrider.drafters.trees.options import BestFirstOptions
from outrider.drafters.trees.trie import Limits, Trie

RETRIEVERS = ("suffix", "prompt-lookup", "ngram-cache", "reference", "rest")
"""Methods that retrieve. They learn from the text alone, so their guesses may be dropped without telling them."""


@dataclass(frozen=True)
class RasdOptions:
    """The retriever, the threshold for dropping branches, and the size of the draft model's own tree."""

    retriever: str = "suffix"
    """The method that retrieves: suffix, prompt-lookup, ngram-cache, reference or rest. Its options are given beside this."""
    min_chance: float = 0.02
    """A retrieved branch is dropped if the draft model gives its first token less probability than this."""
    draft_depth: int = 4
    """Levels of the draft model's own tree, one pass each. Retrieved branches may be deeper (``num_draft_tokens``)."""
    width: int = 4
    """Nodes expanded per level, in one pass of the draft model."""
    num_children: int = 4
    """Candidates considered below each of them."""
    tau: float = 0.9
    """Assumed distance between the draft's and the target's logits; smaller means more confident. Only the shape depends
    on it."""
    perturb: bool = True
    """Rank candidates with the target's noise, as the coupled rule chooses. Turn off for rule ``delta``."""

    @property
    def tree(self) -> BestFirstOptions:
        return BestFirstOptions(self.width, self.num_children, self.tau, self.perturb)

    def __post_init__(self) -> None:
        assert self.tree  # raises where its own options are not valid
        if self.retriever not in RETRIEVERS:
            raise OptionError(f"retriever = {self.retriever!r} is not valid; {nearest(str(self.retriever), RETRIEVERS)}")
        if not isinstance(self.draft_depth, int) or self.draft_depth < 1:
            raise OptionError(f"draft_depth = {self.draft_depth!r} is not valid; use a whole number of at least 1")
        if not 0 <= self.min_chance < 1:
            raise OptionError(f"min_chance = {self.min_chance!r} is not valid; use a number from 0 to below 1")


@dataclass
class RasdState(RowState):
    """The draft model's cache, the retriever's state, and how far retrieved branches were accepted in every row."""

    cache: Cache
    retrieved: Any
    holds: list[SourceRates]
    slots: list[list[int]] | None = None
    """Slot of each proposed node in the draft's forest; -1 for a node that was not fed."""
    tails: list[list[int]] = field(default_factory=list)
    """Depth of each proposed node that was retrieved; 0 for the others."""

    def fork(self, rows: Sequence[int]) -> RasdState:
        return RasdState(self.cache.fork(rows), self.retrieved.fork(rows), [self.holds[row].copy() for row in rows])

    def join(self, other: RasdState) -> RasdState:
        joined = self.retrieved.join(other.retrieved)
        return RasdState(self.cache.join(other.cache), joined, [*self.holds, *other.holds])


@final
class Rasd(Drafter):
    """A draft model's best-first tree with retrieved branches."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    waits: ClassVar = "every verdict decides what its parts draft next"
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC
    drafts_alone = True

    def __init__(
        self,
        model: Target,
        retriever: Drafter,
        options: RasdOptions | None = None,
        *,
        vocab_size: int,
        trust_rounds: float = 30,
    ) -> None:
        self.model, self.retriever = model, retriever
        self.options = options or RasdOptions()
        self.vocab_size, self.trust_rounds = vocab_size, trust_rounds

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return self.retriever.memories

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> RasdState:
        holds = [SourceRates(self.trust_rounds) for _ in rows]
        return RasdState(self.model.new_cache(len(rows)), self.retriever.start(rows, taps), holds)

    def propose(self, state: RasdState, context: Context, plan: Plan) -> Draft:
        found = self.retriever.propose(state.retrieved, context, plan).tree
        limits = zip(context.tokens, plan.max_depth, plan.max_nodes, strict=True)
        depths = [room(self.model, tokens, min(depth, nodes, self.options.draft_depth)) for tokens, depth, nodes in limits]
        state.slots = None
        if not any(depths):
            return Draft(found, self.draws)
        growth = DraftGrowth(self.model, state.cache, context, vocab_size=self.vocab_size, depths=depths)
        source, options = LikelyChildren(growth, self.options.tree), self.options
        first = source.chances(0)[:, 0]
        pool = grow_pool(source, width=options.width, num_children=options.num_children, max_depth=max(depths))
        tree, origin = pool.best_tree(Plan(tuple(depths), plan.max_nodes))
        chances, numbers = pool.chances.gather(1, origin).tolist(), pool.numbers.gather(1, origin).tolist()
        rows = [_Union(tree, row, chances[row], numbers[row]) for row in range(tree.batch_size)]
        for row, union in enumerate(rows):
            self._insert(union, found, row, first=first[row], holds=state.holds[row])
        limits = map(Limits, plan.max_depth, plan.max_nodes)
        kept = [union.best(limit) for union, limit in zip(rows, limits, strict=True)]
        state.slots, state.tails = [row.slots for row in kept], [row.tails for row in kept]
        return Draft(TokenTree.of_rows([(row.tokens, row.parents) for row in kept], context.device), self.draws)

    def observe(self, state: RasdState, observation: Observation) -> None:
        if state.slots is None:
            return
        kept: list[list[int]] = []
        for row, path in enumerate(observation.paths):
            slots, tails = state.slots[row], state.tails[row]
            kept.append([slots[node] for node in path[1:] if slots[node] >= 0])
            reached = max((tails[node] for node in path), default=0)
            if reached:  # the first retrieved token held, so the others were put to the test
                state.holds[row].record(0, max(tails) - 1, range(reached - 1))
        if any(slot >= 0 for slots in state.slots for slot in slots):
            state.cache.commit(kept)
        state.slots, state.tails = None, []

    def finish(self, state: RasdState, row: int, tokens: Sequence[int]) -> None:
        self.retriever.finish(state.retrieved, row, tokens)

    def _insert(self, union: _Union, found: TokenTree, row: int, *, first: Tensor, holds: SourceRates) -> None:
        """Drop unlikely retrieved branches of a row, and add the rest to its tree."""
        size = found.sizes[row]
        tokens, parents = found.tokens[row, :size].tolist(), found.parents[row, :size].tolist()
        hold = [0.0, 0.0, *map(math.log, holds.chances(size))]  # by depth
        chances, depths, places = [0.0], [0], [0]
        begins = first[torch.tensor(tokens, device=first.device)].tolist()
        for node in range(1, size):
            parent = parents[node]
            begin = begins[node] if parent == 0 else chances[parent]
            depths.append(depths[parent] + 1)
            chances.append(begin)
            dropped = math.exp(begin) < self.options.min_chance or places[parent] < 0
            chance = begin + hold[depths[node]]
            places.append(-1 if dropped else union.add(tokens[node], places[parent], chance, depths[node]))


@dataclass
class _Row:
    tokens: list[int]
    parents: list[int]
    slots: list[int]
    tails: list[int]


class _Union:
    """One row's growing tree: the draft's nodes, then the retrieved ones that are not among them."""

    def __init__(self, tree: TokenTree, row: int, chances: list[float], numbers: list[int]) -> None:
        self.trie = Trie(int(tree.tokens[row, 0]))
        self.trie.add_tree(tree, row, chances)
        self.slots = [number - 1 for number in numbers[: tree.sizes[row]]]
        """Slots of the draft's nodes in its forest; -1 for a node that was not fed."""
        self.tails: dict[int, int] = {}
        """Depth of the retrieved nodes."""

    def add(self, token: int, parent: int, chance: float, depth: int) -> int:
        """Add a retrieved node. Returns its place, or that of the draft's equal node."""
        place = self.trie.add(token, parent, chance)
        self.tails[place] = depth
        return place

    def best(self, limits: Limits) -> _Row:
        """The likeliest nodes in breadth-first order."""
        order = self.trie.breadth_first(self.trie.likeliest(limits))
        slots = [self.slots[node] if node < len(self.slots) else -1 for node in order]
        return _Row(*self.trie.row(order), slots, [self.tails.get(node, 0) for node in order])


def build(parts: Parts) -> Drafter:
    retriever = parts.drafter_of(parts.options.retriever)
    return Rasd(parts.draft_model, retriever, parts.options, vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="retrieved branches, weeded by a draft model and fused with its tree",
    paper="Quan et al. 2025, RASD (arXiv 2503.03434)",
    drafter=Rasd,
    build=build,
    options=RasdOptions,
    defaults={"num_draft_tokens": 12, "num_tree_nodes": 24, "tree": True},
    needs_draft=True,
    parts="retriever",
)
