"""Token Recycling: the target's likeliest tokens after a token, the last time it was scored, are good guesses the next time.

Every scored node, accepted or not, comes with the target's law of the token after it, which ordinary speculation drops. Here
the best few successors of each token are kept in a table over the vocabulary. The next tree is read from the table level by
level: the candidates of a node are the successors of its token. Drafting needs no weights and no model call. The table is first
filled from the prompt's own states. (Luo et al. 2024, "Turning Trash into Treasure", arXiv 2408.08696.)

    token[child] = M[token[parent], rank[child]]           drafting: one gather per level
    M[token[n]] <- top-k of the target's logits at n       after the pass, for every node n of the tree

Nodes are chosen by the rank of each guess on the path (the paper's static tree), or by the stored probability. The latter tells
a sure successor from a doubtful one of the same rank:

    value[child] = value[parent] * (0.65 * softmax(M logits)[rank] + 0.04 / (1 + rank));      keep the n largest

Guesses are looked up, not sampled: lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError, nearest
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Stateless, Target
from outrider.core.lasting_memory import LastingMemory
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.itself.successors import SuccessorTable
from outrider.drafters.trees.best_first import grow_pool
from outrider.drafters.trees.children import Children, ChildSource
from outrider.drafters.trees.shape import TreeShape
from outrider.drafters.trees.static import grow_shapes
from outrider.drafters.trees.trie import Limits, Trie, best_first

RANK_ACCEPTANCE = (0.48, 0.107, 0.054, 0.033, 0.025, 0.021, 0.014, 0.012, 0.011, 0.01, 0.01, 0.009, 0.008, 0.007, 0.007, 0.007)
"""How often the target's choice is a token's r-th successor, at any depth. Measured in docs/methods/token-recycling.md."""

_TRUST, _FLOOR = 0.65, 0.04
"""A successor stored with probability p at rank r is right with probability 0.65 p + 0.04 / (1 + r). Fitted to that
measurement."""

_MAX_DEPTH = 8
"""Longest path of a tree grown by confidence. Longer paths are unlikely to be accepted."""

_CHUNK = 128
"""Prompt states turned into logits at once. Bounds memory at this many times the vocabulary."""

_IDLE_SHARE = 16
"""While nothing is drafted, one round in this many is recycled."""

_FEW = 64
"""On a CPU, trees of up to this many guesses in all are grown node by node. More are grown level by level."""

_WAYS = ("confidence", "ranks")


@dataclass(frozen=True)
class TokenRecyclingOptions:
    """Contents of the table, and the choice of guesses. The plan sets the size of the tree (``num_tree_nodes``)."""

    num_successors: int = 16
    """k: successors stored for each token. (The paper: 8.)"""
    grow: str = "confidence"
    """How nodes are chosen: by "confidence", the probabilities stored with the successors, or by "ranks", one static tree."""
    recycle_prompt: bool = True
    """Whether the prompt's states fill the table too. This costs the target's head once per distinct prompt token. It is
    skipped if the head cannot be run apart."""
    perturb: bool = True
    """When sampling at temperature T, rank a token's successors by logit + T g, where g is the target's noise at that
    position. The coupled rule chooses by the same noise. Turn off for rules that do not use it."""

    def __post_init__(self) -> None:
        if not isinstance(self.num_successors, int) or self.num_successors < 1:
            raise OptionError(f"num_successors = {self.num_successors!r} is not valid; use a whole number of at least 1")
        if self.grow not in _WAYS:
            raise OptionError(f"grow = {self.grow!r} is not valid; {nearest(str(self.grow), _WAYS)}")


@final
class TokenRecycling(Drafter):
    """Trees read out of a table of successors."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC
    drafts_alone = True
    reads_logits = True

    def __init__(self, target: Target, table: SuccessorTable, options: TokenRecyclingOptions | None = None) -> None:
        """``table`` is shared by all requests and outlives them. Nothing else here changes."""
        self.target = target
        self.table = table
        self.options = options or TokenRecyclingOptions()
        self.taps = (target.num_layers,) if self.options.recycle_prompt and target.traits.can_read_out else ()

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return (self.table,)

    @torch.inference_mode()
    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        """Fill the table from the prompt's states. The last occurrence of a token counts."""
        states = taps.get(self.target.num_layers, [])
        for row, hidden in zip(rows, states):
            positions = sorted({token: position for position, token in enumerate(row[:-1])}.values())
            for begin in range(0, len(positions), _CHUNK):
                chunk = positions[begin : begin + _CHUNK]
                tokens = torch.tensor([row[position] for position in chunk], device=hidden.device)
                self.table.write(tokens, self.target.logits(hidden[chunk]))
        return Stateless()

    def round_taps(self, state: Stateless) -> tuple[int, ...]:
        """No taps: a round's own logits are enough."""
        del state
        return ()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        source = _Successors(self.table, context, perturb=self.options.perturb)
        tree = _by_ranks(source, plan) if self.options.grow == "ranks" else _by_confidence(source, plan)
        return Draft(tree, self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        """Write every node to the table. Where a token occurs several times, an accepted node wins, then a later one.
        While nothing is drafted, some rounds are left out: writing takes a tenth of a small model's round."""
        del state
        if observation.plan is not None and not any(observation.plan.max_depth):
            self.table.num_idle += 1
            if self.table.num_idle % _IDLE_SHARE:
                return
        tree, paths = observation.draft.tree, [set(path) for path in observation.paths]
        width = tree.num_nodes
        nodes = [(node, row) for node in range(width) for row, size in enumerate(tree.sizes) if node < size]
        nodes.sort(key=lambda entry: entry[0] in paths[entry[1]])  # stable: breadth-first within each half
        order = torch.tensor([row * width + node for node, row in nodes], device=tree.tokens.device)
        self.table.write(tree.tokens.flatten(), observation.scores.logits.flatten(0, 1), order=order)


@final
class _Successors(ChildSource):
    """The table during one round: the children of a node are the successors of its token."""

    runs_out = True

    def __init__(self, table: SuccessorTable, context: Context, *, perturb: bool) -> None:
        self.context, self.table = context, table
        self.noise = context.noise if perturb and not context.sampler.all_greedy else None
        heat = [row.params.temperature for row in context.sampler.rows]
        self.temperature = torch.tensor(heat, device=context.device)[:, None, None]
        self._tokens = torch.tensor(context.roots, device=context.device)[:, None]
        self._num_expanded = 1

    @property
    def num_expanded(self) -> int:
        return self._num_expanded

    def expand(self, tokens: Tensor, parents: Tensor) -> None:
        del parents
        self._tokens = tokens
        self._num_expanded += tokens.shape[1]

    def children(self, count: int, *, depth: int, lanes: Tensor | None = None) -> Children:
        """Stored successors and the log-probability that each is right. With noise, they are ranked again."""
        del lanes
        ids, scores = self.of(self._tokens, depth=depth)
        floor = _FLOOR / torch.arange(1, ids.shape[2] + 1, device=ids.device)
        chances = (_TRUST * scores.softmax(-1) + floor).log().masked_fill(ids < 0, -torch.inf)
        return Children(ids[..., :count], chances[..., :count])

    def after(self, row: int, place: tuple[int, int]) -> list[tuple[int, float, tuple[int, int]]]:
        """Successors of one node, a token at a depth: token, probability, and the place that it leads to."""
        token, depth = place
        ids, scores = self.table.ids[token].tolist(), self.table.logits[token].tolist()
        if ids[0] < 0:
            return []
        heat = self.context.sampler.rows[row].params.temperature
        if self.noise is not None and heat > 0:
            depths = torch.full((len(self.context.roots), 1), depth)
            noise = self.noise.target_gumbel(depths, len(self.table.ids))[row, 0, ids].tolist()
            ranked = sorted(
                zip((score + heat * more for score, more in zip(scores, noise, strict=True)), ids), key=lambda one: -one[0]
            )
            scores, ids = [score for score, _ in ranked], [token for _, token in ranked]
        weights = [math.exp(score - scores[0]) for score in scores]
        trust = _TRUST / sum(weights)
        chances = (trust * weight + _FLOOR / rank for rank, weight in enumerate(weights, 1))
        return [(token, chance, (token, depth + 1)) for token, chance in zip(ids, chances, strict=True)]

    def of(self, tokens: Tensor, *, depth: int) -> tuple[Tensor, Tensor]:
        """[B, M, k] successors of ``tokens`` [B, M] at ``depth``, the best first, and their scores; -1 where unknown."""
        known = tokens.clamp(min=0)
        ids = self.table.ids[known].masked_fill((tokens < 0)[..., None], -1)
        scores = self.table.logits[known]
        if self.noise is None:
            return ids, scores
        depths = torch.full((len(ids), 1), depth, device=ids.device)
        gumbel = self.noise.target_gumbel(depths, len(self.table.ids)).expand(-1, ids.shape[1], -1)
        scores = scores + self.temperature * gumbel.gather(2, ids.clamp(min=0))
        scores, best = scores.sort(dim=-1, descending=True, stable=True)
        return ids.gather(2, best), scores


def _by_ranks(source: _Successors, plan: Plan) -> TokenTree:
    """The static tree of every row's size."""
    acceptance = RANK_ACCEPTANCE[: source.table.num_successors]
    limits = zip(plan.max_nodes, plan.max_depth, strict=True)
    return grow_shapes(source, [TreeShape.of_acceptance(acceptance, nodes, depth) for nodes, depth in limits])[0].tree


def _by_confidence(source: _Successors, plan: Plan) -> TokenTree:
    """The nodes that each row is most likely to reach."""
    is_small = source.context.device.type == "cpu" and sum(plan.max_nodes) <= _FEW
    return _node_by_node(source, plan) if is_small else _level_by_level(source, plan)


def _node_by_node(source: _Successors, plan: Plan) -> TokenTree:
    """The tree of one row, grown from its likeliest open node, one after the other."""
    rows = []
    for row, root in enumerate(source.context.roots):
        limits = Limits(min(plan.max_depth[row], _MAX_DEPTH), plan.max_nodes[row])
        rows.append(best_first(Trie(root), (root, 0), partial(source.after, row), limits=limits).row())
    return TokenTree.of_rows(rows, source.context.device)


def _level_by_level(source: _Successors, plan: Plan) -> TokenTree:
    """The trees of all rows together, level by level. Every level keeps as many nodes as a whole tree may have."""
    width = max(plan.max_nodes)
    max_depth = min(max(plan.max_depth), _MAX_DEPTH) if width else 0
    pool = grow_pool(source, width=width, num_children=source.table.num_successors, max_depth=max_depth, keep=width)
    return pool.best_tree(plan, runs_out=True)[0]


def build(parts: Parts) -> Drafter:
    target = parts.target
    table = SuccessorTable(target.vocab_size, parts.options.num_successors, device=target.device)
    return TokenRecycling(target, table, parts.options)


ROW = MethodRow(
    summary="a tree of what the target last said after each token",
    paper="Luo et al. 2024 (arXiv 2408.08696)",
    drafter=TokenRecycling,
    build=build,
    options=TokenRecyclingOptions,
    defaults={"num_draft_tokens": 8, "num_tree_nodes": 60},
)
