"""The coupled rule: a guess is right when it is the token the target itself would have drawn.

The target's token at an output position is its Gumbel-max choice with that position's noise, so the text is fixed by the seed
and the model before anything is drafted. The walk follows the branch that holds this text, and adds the target's next choice.
Nothing is assumed about the guesses. They may be sampled, copied, or made with the same noise, which makes more of them right.
At temperature 0 the choice is the argmax: the rule is then greedy verification.

    y(s) = argmax_v log p(v | s) + g_position(v);    follow the child x of s that equals y(s);    end with y(s)

Same seed, same text, whatever was drafted. Gumbel coupling of draft and target: Daliri, Musco & Suresh 2024, arXiv
2408.07978. Lossless for every way of drawing: y ~ p at every position, and the guesses only decide how many positions
a round covers.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.paths import chain_verdict, deepest, first_run, path_of, tree_verdict
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict

_FEW = 256
"""Batches of chains with up to this many nodes are walked by a loop, which is faster than a dozen operators."""


@final
class Coupled(AcceptanceRule):
    """Follow the target's own choice."""

    exact_for: ClassVar = (Draws.DETERMINISTIC, Draws.IID, Draws.WITHOUT_REPLACEMENT, Draws.BEAM)
    keeps_seed: ClassVar = True
    can_be_captured: ClassVar = True
    follows_choices: ClassVar = True
    shape: ClassVar = Shape.TREE
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        reached, depth = [0], 0
        while True:
            choices = {node: source.target_choice(row.p[node], depth) for node in reached}
            below = [child for node in reached for child in row.children(node) if row.tokens[child] == choices[node]]
            if not below:
                end = min(reached)
                return RowVerdict(path_of(row, end), choices[end], rejected=bool(row.children(end)))
            reached, depth = below, depth + 1

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        del noise  # the law's choices are made with it
        tree, choices = draft.tree, law.choices
        is_small = tree.tokens.device.type == "cpu" and (tree.tokens.numel() <= _FEW or not tree.is_chain)
        if is_small:
            return followed_one_by_one(tree, choices)
        if tree.is_chain:
            num_accepted = first_run(tree, tree.tokens[:, 1:] == choices[:, :-1])
            return chain_verdict(tree, num_accepted, choices.gather(1, num_accepted[:, None])[:, 0])
        return followed(tree, choices)


def followed(tree: TokenTree, choices: Tensor) -> Verdict:
    """Walk a tree whose choices after each node are ``choices`` [B, N], without a loop."""
    ends = deepest(tree, tree.tokens[:, 1:] == choices.gather(1, tree.parents[:, 1:]))
    return tree_verdict(tree, ends, choices.gather(1, ends[:, None])[:, 0])


def followed_one_by_one(tree: TokenTree, choices: Tensor) -> Verdict:
    """The walk, node by node. On a CPU a few dozen steps are faster than a dozen kernels."""
    paths: list[list[int]] = []
    next_tokens: list[int] = []
    rejected: list[bool] = []
    for tokens, parents, said, size in zip(tree.tokens.tolist(), tree.parents.tolist(), choices.tolist(), tree.sizes):
        depths, end = [0] + [-1] * (size - 1), 0  # -1: not reached
        for node in range(1, size):
            above = parents[node]
            if depths[above] >= 0 and tokens[node] == said[above]:
                depths[node] = depths[above] + 1
                end = node if depths[node] > depths[end] else end
        next_tokens.append(said[end])
        rejected.append(end in parents[1:size])
        path: list[int] = []
        while end > 0:
            path.append(end)
            end = parents[end]
        paths.append(path[::-1])
    longest = max(1, *map(len, paths))
    nodes = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
    lengths = torch.tensor([len(path) for path in paths])
    return Verdict(nodes, lengths, torch.tensor(next_tokens), torch.tensor(rejected))
