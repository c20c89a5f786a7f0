"""Best-first trees: the draft's confidence decides where the tree is deep and where it is wide.

Level by level the most promising nodes are expanded, every candidate found on the way is remembered with the chance that
the text passes through it, and the tree of the best ``max_nodes`` candidates is proposed. The sum of these chances is the
expected number of accepted guesses, so this is the best tree of its size among what was looked at. (Li et al. 2024, EAGLE-2,
arXiv 2406.16858, with the draft's probability as chance; Wang et al. 2024, OPT-Tree, arXiv 2406.17276.)

    chance(child) = chance(parent) * P(target says child | parent, noise)
    coupled:   P = softmax((l + T g) / tau)      l: the draft's logits, g: the target's noise there (trees/candidates.py)
    perturb off:  P = q

With the noise known a branch is often nearly certain where q alone is not: a flat q with one lucky token is as good as a
peaked one, so a sampled text gets the deep, narrow trees of a greedy one. Candidates are chosen and pruned, never sampled:
lossless under ``coupled`` (same seed, same text) and ``delta``. A child never has a larger chance than its parent, and equal
ones are ordered by age, so what is kept is always a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, GuessingTarget, Plan, Target, TreeSearch
from outrider.core.sampling import Law
from outrider.core.table import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.model.catch_up import missing_from
from outrider.drafters.model.draft_tree import TreeDrafter, TreeState
from outrider.drafters.trees.candidates import coupled_scores, log_chances, plain_scores
from outrider.drafters.trees.levels import LevelGrowth, TreeGrowth, kept_part


@dataclass(frozen=True)
class BestFirstOptions:
    """How much is looked at. The size of the tree is the policy's (``num_draft_tokens`` deep, ``num_tree_nodes``)."""

    width: int = 4
    """Nodes expanded per level, in one pass of the draft model."""
    num_children: int = 4
    """Candidates looked at below each of them."""
    tau: float = 0.9
    """How far the draft's logits are from the target's: small is sure of itself. Only the shape depends on it."""
    perturb: bool = True
    """Rank candidates with the target's noise, as the coupled rule chooses; turn off for rule ``delta``."""

    def __post_init__(self) -> None:
        for name in ("width", "num_children"):
            value = vars(self)[name]
            if not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least 1")
        if not self.tau > 0:
            raise OptionError(f"tau = {self.tau!r} is not valid; use a number above 0 (1 takes the draft's word)")


@final
class BestFirst(TreeDrafter):
    """Trees of the likeliest paths."""

    offers: ClassVar = (Draws.DETERMINISTIC,)

    def __init__(self, model: Target, options: BestFirstOptions | None = None, *, vocab_size: int) -> None:
        super().__init__(model, vocab_size=vocab_size, draws=Draws.DETERMINISTIC)
        self.options = options or BestFirstOptions()

    def _guessed(self, state: TreeState, context: Context, plan: Plan) -> tuple[TokenTree, Tensor] | None:
        """Sampling must be nothing but a temperature and a cut, and candidates ranked with the noise."""
        model, tempering, options = self.model, context.sampler.tempering, self.options
        if tempering is None or not isinstance(model, GuessingTarget) or model.vocab_size > self.vocab_size:
            return None
        if not (options.perturb or context.sampler.all_greedy):
            return None
        search = TreeSearch(options.width, options.num_children, options.tau)
        rows = missing_from(model, state.cache, context)
        return model.guess_tree(rows, state.cache, search=search, plan=plan, tempering=tempering, noise=context.noise)

    def _grow(self, growth: TreeGrowth, plan: Plan) -> tuple[Draft, Tensor]:
        pool = grow_pool(growth, growth.root(), options=self.options, max_depth=max(plan.max_depth))
        tree, origin = pool.best_tree(plan)
        return Draft(tree, Draws.DETERMINISTIC), pool.numbers.gather(1, origin)


def grow_pool(growth: LevelGrowth, law: Law, *, options: BestFirstOptions, max_depth: int) -> Pool:
    """The candidates that ``max_depth`` levels of the best ``width`` nodes have, from the law after the root."""
    pool = Pool.of_roots(growth)
    frontier = torch.zeros_like(pool.tokens)  # places in the pool
    for depth in range(max_depth):
        begin = pool.tokens.shape[1]
        chances = candidate_chances(law, growth.context, options=options, depth=depth)
        found = chances.topk(min(options.num_children, chances.shape[-1]), -1)
        total = pool.chances.gather(1, frontier)[..., None] + found.values
        above = frontier[..., None].expand_as(found.indices)
        pool.add(found.indices.flatten(1), above.flatten(1), total.flatten(1), depth + 1)
        if depth + 1 < max_depth:
            frontier = pool.best(begin, options.width)
            law = pool.expand(frontier, growth)
    return pool


def candidate_chances(law: Law, context: Context, *, options: BestFirstOptions, depth: int) -> Tensor:
    """[B, M, V] log-probability that each token is the target's choice after nodes at ``depth``, as the draft sees it."""
    coupled = options.perturb or context.sampler.all_greedy
    scores = coupled_scores(law, context, depth=depth) if coupled else plain_scores(law, context)
    return log_chances(scores, options.tau if coupled else 1.0)


@final
@dataclass(eq=False)
class Pool:
    """Every candidate looked at, in breadth-first order, the root first."""

    tokens: Tensor
    """[B, P]"""
    parents: Tensor
    """[B, P] places in the pool, -1 for the root."""
    chances: Tensor
    """[B, P] log-probability that the text passes through."""
    numbers: Tensor
    """[B, P] among the expanded nodes; 0 for the root and for what was not expanded."""
    depths: list[int]
    """[P] the same in every row."""

    @staticmethod
    def of_roots(growth: LevelGrowth) -> Pool:
        tokens = torch.tensor(growth.context.roots, device=growth.context.device)[:, None]
        return Pool(tokens, torch.full_like(tokens, -1), tokens.new_zeros(tokens.shape, dtype=torch.float32), tokens * 0, [0])

    def add(self, tokens: Tensor, parents: Tensor, chances: Tensor, depth: int) -> None:
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.chances = torch.cat([self.chances, chances.to(self.chances.dtype)], 1)
        self.numbers = torch.cat([self.numbers, torch.zeros_like(tokens)], 1)
        self.depths += [depth] * tokens.shape[1]

    def best(self, begin: int, width: int) -> Tensor:
        """[B, W] the best candidates from ``begin`` on, in the order of the pool."""
        count = min(width, self.tokens.shape[1] - begin)
        return self.chances[:, begin:].topk(count, -1).indices.sort(-1).values + begin

    def expand(self, places: Tensor, growth: LevelGrowth) -> Law:
        """The draft's law after the candidates at ``places`` [B, W]."""
        first, count = growth.num_expanded, places.shape[1]
        above = self.numbers.gather(1, self.parents.gather(1, places))
        law = growth.expand(self.tokens.gather(1, places), above)
        numbers = torch.arange(first, first + count, device=places.device).expand_as(places)
        self.numbers = self.numbers.scatter(1, places, numbers)
        return law

    def best_tree(self, plan: Plan) -> tuple[TokenTree, Tensor]:
        """The best candidates within every row's plan, and [B, N] their places in the pool."""
        device = self.tokens.device
        depths = torch.tensor(self.depths, device=device)
        too_deep = depths > torch.tensor(plan.max_depth, device=device)[:, None]
        order = self.chances.masked_fill(too_deep, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=device).expand_as(order))
        kept = (place <= torch.tensor(plan.max_nodes, device=device)[:, None]) & ~too_deep
        return kept_part(self.tokens, self.parents, kept)


def build(parts: Parts) -> Drafter:
    return BestFirst(parts.draft_model, parts.options, vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="a draft model grows its most promising branches",
    paper="Li et al. 2024, EAGLE-2's trees (arXiv 2406.16858)",
    drafter=BestFirst,
    build=build,
    options=BestFirstOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 32},
    needs_draft=True,
)
