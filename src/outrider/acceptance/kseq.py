"""k-SEQ: k independent guesses are tested one by one, and the first that passes is kept. One factor scales all tests.

Testing each of k guesses as if it were alone keeps too many: likely tokens come up several times. Rule k-SEQ divides the
acceptance probability by rho, the smallest factor (at most k) for which the kept guesses supply no more than the target's law.
If none passes, the token is drawn from the residual. Several drafts may agree with the accepted tokens. They are continued
together: at the next level their guesses are again independent draws from one q.

    beta(rho) = sum_v min(p(v) / rho, q(v));    kept(rho) = 1 - (1 - beta)^k;    rho* = min{rho >= 1 : kept <= rho beta}
    for guess x in order:   accept with probability min(1, p(x) / (rho* q(x)))
    none accepted:          y ~ norm(p - min(p / rho*, q) kept / beta)

Sun et al. 2023, "SpecTr: Fast Speculative Decoding via Optimal Transport", arXiv 2310.15141. Lossless for independent siblings,
duplicates kept. *Proof.* A trial accepts v with probability min(q, p / rho)(v). So v is the first accepted of k with min(q, p /
rho)(v) kept / beta <= p(v), because kept / beta <= rho and min(q, p / rho) <= p / rho. The rest has mass 1 - kept. rho = k
always satisfies the condition (kept <= k beta). A larger rho than needed is exact too, so bisection returns its upper end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.acceptance.independent_guesses import IndependentGuessesRule
from outrider.acceptance.paths import row_at, tree_verdict
from outrider.acceptance.residual import draw, ratio
from outrider.core.draft import Draft
from outrider.core.equal_siblings import first_twins
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.verdict import Verdict

_PRECISION = 1e-7
"""How close the bisection comes to rho*. Exactness does not depend on it: any rho above rho* is exact."""


@final
class KSeq(IndependentGuessesRule):
    """Accept the first of k guesses that passes a common test."""

    def accept_row(self, row: RowDraft, end: int, guesses: Sequence[int], source: RandomSource) -> tuple[int | None, Tensor]:
        p = row.p[end]
        q = p if row.q is None else row.q[end]
        rho = _smallest_factor_row(p.tolist(), q.tolist(), len(guesses))
        for child in guesses:
            token = row.tokens[child]
            if source.bernoulli(ratio(float(p[token]), rho * float(q[token])), child):
                return token, p
        return None, _missing_part(p, q, rho=p.new_tensor(rho), count=p.new_tensor(len(guesses)))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, p = draft.tree, law.probs
        assert draft.q is not None or tree.num_nodes == 1, "sampled guesses come with their q"
        q = p if draft.q is None else draft.q
        first = first_twins(tree)
        above = first.gather(1, tree.parents.clamp(min=0))
        is_guess = tree.valid & (tree.parents >= 0)
        counts = torch.zeros_like(p[..., 0]).scatter_add(1, above, is_guess.to(p.dtype))
        rho = _smallest_factor(p, q, counts)
        lanes = torch.arange(tree.num_nodes, device=p.device).expand(tree.batch_size, -1)
        coins = noise.uniform(Purpose.ACCEPT, lanes)
        flat = above * p.shape[2] + tree.tokens
        p_guess, q_guess = p.flatten(1).gather(1, flat), q.flatten(1).gather(1, flat)
        passes = is_guess & (coins * rho.gather(1, above) * q_guess < p_guess)
        ends = torch.zeros_like(tree.tokens[:, 0])
        for node in range(1, tree.num_nodes):  # a guess that passes comes after the nodes it is a guess for
            ends = torch.where(passes[:, node] & (above[:, node] == ends), first[:, node], ends)
        p_end, at = row_at(p, ends), ends[:, None]
        owed = _missing_part(p_end, row_at(q, ends), rho=rho.gather(1, at)[:, 0], count=counts.gather(1, at)[:, 0])
        owed = torch.where(counts.gather(1, at) > 0, owed, p_end)  # where nothing was guessed q means nothing
        return tree_verdict(tree, ends, draw(owed, p_end, noise))


def _smallest_factor_row(p: list[float], q: list[float], count: int) -> float:
    """rho* for ``count`` guesses from ``q`` against ``p``."""
    low, high = 1.0, float(max(count, 1))
    while high - low > _PRECISION:
        rho = (low + high) / 2
        beta = sum(min(p_v / rho, q_v) for p_v, q_v in zip(p, q, strict=True))
        if 1 - max(1 - beta, 0.0) ** count > rho * beta:
            low = rho
        else:
            high = rho
    return high


def _smallest_factor(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """[B, N] the same for ``count`` [B, N] guesses at every node of a batch."""
    low, high = torch.ones_like(count), count.clamp(min=1)
    widest = count.shape[1] - 1  # no node has more guesses than that, and none of the trees is asked
    for _ in range(math.ceil(math.log2(widest / _PRECISION)) if widest else 0):  # a bare root has nothing to look for
        rho = (low + high) / 2
        beta = torch.minimum(p / rho[..., None], q).sum(-1)
        too_small = 1 - (1 - beta).clamp(min=0) ** count > rho * beta
        low, high = torch.where(too_small, rho, low), torch.where(too_small, high, rho)
    return high


def _missing_part(p: Tensor, q: Tensor, *, rho: Tensor, count: Tensor) -> Tensor:
    """[..., V] the residual when none of the guesses was accepted."""
    supplied = torch.minimum(p / rho[..., None], q)
    beta = supplied.sum(-1)
    kept = 1 - (1 - beta).clamp(min=0) ** count
    return (p - supplied * torch.where(beta > 0, kept / beta, 0.0)[..., None]).clamp(min=0)
