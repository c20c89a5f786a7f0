"""Optimal transport: of k independent guesses one is kept as often as any lossless rule can keep one.

A rule that sees k draws of q and keeps one of them supplies every set S of tokens at most as often as S is drawn, 1 - (1 -
q(S))^k. No token may be kept more often than p says, either. The best supply is min(p, c q) with the largest c that respects
the first bound. The rule k-SEQ has the same form with a smaller c, because it decides on each guess before it sees the next.

    tokens in falling order of p / q;   Q_j = q(first j tokens),  P_j = p(first j tokens),  F(x) = 1 - (1 - x)^k
    missing = max_j (P_j - F(Q_j)), at least 0;    c = max_j (P_j - missing) / Q_j;    accepted = 1 - missing

The order gives every token a *place*. If the guess with the first place is kept, token j is kept with probability q_j f_j,
where f_j = (F(Q_j) - F(Q_{j-1})) / q_j is the worth of the place. The token needs q_j n_j, with n_j = min(p_j / q_j, c). Tokens
with f > n have a surplus, those with f < n a deficit. Laid end to end, the deficits stand beside surpluses of earlier tokens.
Where surplus i and deficit j overlap, the two exchange places:

    a draw of i takes place j with probability overlap / (q_i (f_i - f_j))
    a draw of j takes place i with probability overlap / (q_j (f_i - f_j))
    the first place wins, the earlier guess among equals;   the winner x is accepted with probability min(1, p(x) / m(x))
    m = what wins: q n for a deficit, q f less what it gave for a surplus;     not accepted:  y ~ norm((p - m)+)

Sun et al. 2023 (SpecTr, arXiv 2310.15141) state the problem as a linear program; the solution by sorting and exchange is
derived in docs/lossless.md. Its cost is one sort of the vocabulary, so nothing is truncated. Lossless for independent siblings,
duplicates kept. At one position it accepts at least as often as ``kseq`` and ``recursive`` do on the same guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.acceptance.independent_guesses import IndependentGuessesRule
from outrider.acceptance.paths import row_at, tree_verdict
from outrider.acceptance.residual import draw, ratio, surplus
from outrider.core.draft import Draft
from outrider.core.equal_siblings import first_twins
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.verdict import Verdict

_TINY = torch.finfo(torch.float64).tiny


@final
class Transport(IndependentGuessesRule):
    """Keep the best of k independent guesses. Random number 2 n decides the place of guess n, and number 2 n + 1 whether it is
    accepted if it wins."""

    def accept_row(self, row: RowDraft, end: int, guesses: Sequence[int], source: RandomSource) -> tuple[int | None, Tensor]:
        p = row.p[end]
        if not guesses:
            return None, p
        plan = _Plan.of(p, p if row.q is None else row.q[end], p.new_tensor(len(guesses)))
        winner = _first_place(plan, row, guesses, source)
        token = row.tokens[winner]
        if source.bernoulli(ratio(float(plan.p[token]), float(plan.wins[token])), 2 * winner + 1):
            return token, p
        return None, surplus(plan.p, plan.wins)

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, p = draft.tree, law.probs
        assert draft.q is not None or tree.num_nodes == 1, "sampled guesses come with their q"
        first = first_twins(tree)
        above = first.gather(1, tree.parents.clamp(min=0))
        is_guess = tree.valid & (tree.parents >= 0)
        counts = torch.zeros_like(p[..., 0]).scatter_add(1, above, is_guess.to(p.dtype))
        plan = _Plan.of(p, p if draft.q is None else draft.q, counts)
        nodes = torch.arange(tree.num_nodes, device=p.device).expand(tree.batch_size, -1)
        place = _place(plan.rows(above), tree.tokens, noise.uniform(Purpose.ACCEPT, 2 * nodes))
        key = place * tree.num_nodes + nodes  # among equal places the earlier guess is smaller
        last = torch.full_like(key, tree.num_nodes * p.shape[2])
        best = last.scatter_reduce(1, above, torch.where(is_guess, key, last), "amin")
        flat = above * p.shape[2] + tree.tokens
        p_guess, wins = plan.p.flatten(1).gather(1, flat), plan.wins.flatten(1).gather(1, flat)
        passes = noise.uniform(Purpose.ACCEPT, 2 * nodes + 1) * wins < p_guess
        passes = passes & is_guess & (key == best.gather(1, above))
        ends = torch.zeros_like(tree.tokens[:, 0])
        for _ in range(tree.num_nodes - 1):  # a path is at most that long; rows that have ended stay where they are
            onward = passes & (above == ends[:, None])
            reached = first.gather(1, onward.int().argmax(1, keepdim=True))[:, 0]
            ends = torch.where(onward.any(1), reached, ends)
        p_end = row_at(plan.p, ends)
        owed = surplus(p_end, row_at(plan.wins, ends))
        owed = torch.where(counts.gather(1, ends[:, None]) > 0, owed, p_end)  # where nothing was guessed q means nothing
        return tree_verdict(tree, ends, draw(owed, p_end, noise))


@dataclass(frozen=True, eq=False)
class _Plan:
    """The coupling at a node: which tokens exchange places, and how often each wins. Float64, with any leading
    dimensions."""

    p: Tensor
    """[..., V] the target's law."""
    wins: Tensor
    """[..., V] m, the probability that a token wins."""
    rank: Tensor
    """[..., V] each token's own place."""
    mass: Tensor
    """[..., V] q of the token at each place."""
    worth: Tensor
    """[..., V] f of each place."""
    surplus_end: Tensor
    """[..., V] running sum of the surpluses, by place."""
    deficit_end: Tensor
    """[..., V] running sum of the deficits, by place."""

    @staticmethod
    def of(p: Tensor, q: Tensor, count: Tensor) -> _Plan:
        """The best coupling of ``count`` [...] draws from ``q`` with ``p`` [..., V]."""
        p, q, k = _norm(p.double()), _norm(q.double()), count[..., None].double()
        order = (p / q.clamp(min=_TINY)).argsort(dim=-1, descending=True, stable=True)
        rank = order.argsort(-1)
        wanted, mass = p.gather(-1, order), q.gather(-1, order)
        drawn, owed = mass.cumsum(-1).clamp(max=1), wanted.cumsum(-1)
        spared = (1 - drawn) ** k  # no draw among the first places
        worth = torch.where(mass > 0, (_before(spared, 1.0) - spared) / mass.clamp(min=_TINY), 0.0)
        missing = (owed - (1 - spared)).amax(-1, keepdim=True).clamp(min=0)
        level = torch.where(drawn > 0, (owed - missing) / drawn.clamp(min=_TINY), 0.0).amax(-1, keepdim=True)
        spare = mass * worth - torch.minimum(wanted, level * mass)
        surplus_end, deficit = spare.clamp(min=0).cumsum(-1), (-spare).clamp(min=0)
        deficit_end = deficit.cumsum(-1)
        given = torch.minimum(surplus_end, deficit_end[..., -1:])
        wins = (mass * worth - (given - _before(given, 0.0)) + deficit).clamp(min=0)
        return _Plan(p, wins.gather(-1, rank), rank, mass, worth, surplus_end, deficit_end)

    def rows(self, nodes: Tensor) -> _Plan:
        """The plans [B, M, V] of ``nodes`` [B, M]."""
        at = nodes[..., None].expand(*nodes.shape, self.p.shape[-1])
        fields = (self.p, self.wins, self.rank, self.mass, self.worth, self.surplus_end, self.deficit_end)
        return _Plan(*(field.gather(1, at) for field in fields))

    def moves(self, token: Tensor) -> Tensor:
        """[..., V] by place: the probability that a draw of ``token`` [..., 1] moves there or to an earlier place."""
        own = self.rank.gather(-1, token)
        overlap = _overlap(self.surplus_end, self.deficit_end, own) + _overlap(self.deficit_end, self.surplus_end, own)
        gap = (self.worth.gather(-1, own) - self.worth).abs()
        mass = self.mass.gather(-1, own)
        moved = torch.where((overlap > 0) & (gap > 0), overlap / gap.clamp(min=_TINY), 0.0)
        moved = torch.minimum(moved, torch.minimum(mass, self.mass))  # rounding must not move more than there is
        return (moved / mass.clamp(min=_TINY)).cumsum(-1)


def _overlap(mine: Tensor, theirs: Tensor, own: Tensor) -> Tensor:
    """[..., V] how much of piece ``own`` [..., 1] of one row of pieces lies beside each piece of the other row."""
    begin, end = _before(mine, 0.0).gather(-1, own), mine.gather(-1, own)
    return (torch.minimum(end, theirs) - torch.maximum(begin, _before(theirs, 0.0))).clamp(min=0)


def _before(values: Tensor, start: float) -> Tensor:
    """[..., V] the value at the place before, and ``start`` before the first."""
    return torch.cat([torch.full_like(values[..., :1], start), values[..., :-1]], -1)


def _norm(weights: Tensor) -> Tensor:
    """The law scaled to add up to 1. Float32 laws are off by 1e-7, and running sums would carry that error to the last
    places."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=_TINY)


def _first_place(plan: _Plan, row: RowDraft, guesses: Sequence[int], source: RandomSource) -> int:
    """The winning guess. Places are drawn only if there is more than one guess."""
    if len(guesses) == 1:
        return guesses[0]
    return min(guesses, key=lambda child: _place_row(plan, row.tokens[child], child, source))  # the earlier among equals


def _place_row(plan: _Plan, token: int, node: int, source: RandomSource) -> int:
    """The place of a guess: its own, or the one it moves to."""
    for place, chance in _moves_row(plan, token):
        if source.bernoulli(chance, 2 * node):
            return place
    return int(plan.rank[token])


def _moves_row(plan: _Plan, token: int) -> list[tuple[int, float]]:
    """Every place to which a draw of ``token`` can move, with cumulative probabilities."""
    moves = plan.moves(torch.tensor([token]))
    return [(place, float(moves[place])) for place in (moves - _before(moves, 0.0)).nonzero()[:, 0].tolist()]


def _place(plan: _Plan, tokens: Tensor, uniform: Tensor) -> Tensor:
    """[B, N] the place of every guess of a batch, from one uniform number each."""
    token, uniform = tokens[..., None], uniform[..., None]
    moves = plan.moves(token)
    moved = (uniform >= moves).sum(-1)
    return torch.where(moved < moves.shape[-1], moved, plan.rank.gather(-1, token)[..., 0])
