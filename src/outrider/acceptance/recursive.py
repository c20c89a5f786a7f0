"""Recursive rejection on trees: siblings are tried one after the other, each against what its elders left of the target.

A rejected guess has used up part of the target's law, and the rest takes its place. The next sibling is tested against that
rest, with the law *it* was drawn from. For independent siblings this is q again: a duplicate is always rejected, and the rest
still shrinks. For siblings drawn without replacement it is q without the elder ones. Where a guess is accepted, the walk
continues below it. Where all are rejected, the token is drawn from the rest.

    r <- p;   for child x in order:   accept with probability min(1, r(x) / q'(x)),   else r <- norm((r - q')+)
    independent: q' = q;    without replacement: q' = norm(q without the elder children)
    several drafters, whose guesses take turns: q' from q_s, s = (number of elder children) mod (number of drafters)
    no child left:   y ~ r

Miao et al. 2023 (SpecInfer, arXiv 2305.09781) for independent siblings; Jeon et al. 2024 (RSD, arXiv 2402.14160) and Chen et
al. 2024 (Sequoia, arXiv 2402.12374) without replacement. Lossless for both by Corollary B of docs/lossless.md. The rule works
from the top down, so the number of siblings may depend on other branches (a stochastic beam). Siblings may also come from
different laws, when several drafters take turns (``core/drafter_turns.py``). On a chain it is token-wise rejection.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.paths import path_of, tree_verdict
from outrider.acceptance.residual import NOTHING, draw, draw_row, ratio, surplus
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.drafter_turns import by_turn, law_of_turn, laws_at
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict


@final
class Recursive(AcceptanceRule):
    """Reject siblings one by one."""

    exact_for: ClassVar = (Draws.WITHOUT_REPLACEMENT, Draws.IID, Draws.BEAM)
    shape: ClassVar = Shape.TREE
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        node, entered, rest = 0, True, row.p[0]
        while entered:
            entered, rest, elders = False, row.p[node], list[int]()
            for turn, child in enumerate(row.children(node)):
                guess, drawn_from = row.tokens[child], _drawn_from(row, node, turn, elders)
                if source.bernoulli(ratio(float(rest[guess]), float(drawn_from[guess])), child):
                    node, entered = child, True
                    break
                owed = surplus(rest, drawn_from)
                rest = owed / owed.sum() if owed.sum() > NOTHING else rest
                elders.append(guess)
        return RowVerdict(path_of(row, node), draw_row(rest, row.p[node], source), rejected=bool(row.children(node)))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, p = draft.tree, law.probs
        assert draft.q is not None or tree.num_nodes == 1, "sampled guesses come with their q"
        q = p if draft.q is None else draft.q
        laws = by_turn(q)
        lanes = torch.arange(tree.num_nodes, device=p.device).expand(tree.batch_size, -1)
        coins = noise.uniform(Purpose.ACCEPT, lanes)
        ends, turn, rest = torch.zeros_like(tree.tokens[:, 0]), torch.zeros_like(tree.tokens[:, 0]), p[:, 0]
        elders = torch.zeros_like(rest, dtype=torch.bool)
        for node in range(1, tree.num_nodes):  # a node comes after its parent, so one pass is the whole walk
            tested = (tree.parents[:, node] == ends) & tree.valid[:, node]
            guess, drawn_from = tree.tokens[:, node, None], _norm(laws_at(laws, ends, turn).masked_fill(elders, 0.0))
            passes = coins[:, node, None] * drawn_from.gather(1, guess) < rest.gather(1, guess)
            entered = tested & passes[:, 0]
            owed = surplus(rest, drawn_from)
            total = owed.sum(-1, keepdim=True)
            rejected = (tested & ~entered)[:, None]
            rest = torch.where(entered[:, None], p[:, node], torch.where(rejected & (total > NOTHING), owed / total, rest))
            turn = torch.where(entered, 0, turn + rejected[:, 0])
            if draft.draws is not Draws.IID:
                elders = (elders | torch.zeros_like(elders).scatter(1, guess, rejected)) & ~entered[:, None]
            ends = torch.where(entered, node, ends)
        p_end = p.gather(1, ends[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]
        return tree_verdict(tree, ends, draw(rest, p_end, noise))


def _drawn_from(row: RowDraft, node: int, turn: int, elders: list[int]) -> Tensor:
    """The law of a child of ``node`` that comes after the given elders."""
    if row.q is None:
        return torch.zeros_like(row.p[node])
    law = law_of_turn(row.q[node], turn).clone()
    if row.draws is not Draws.IID:
        law[elders] = 0
    return _norm_row(law)


def _norm_row(weights: Tensor) -> Tensor:
    """Scaled to 1; all zero where nothing is left."""
    return weights / weights.sum() if weights.sum() > 0 else torch.zeros_like(weights)


def _norm(weights: Tensor) -> Tensor:
    """The rows scaled to 1; all zero where nothing is left. (Padding may hold anything, so zero is not a multiplication by
    0.)"""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)
