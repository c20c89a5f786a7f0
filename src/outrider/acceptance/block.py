"""Block verification: the guesses of a chain are judged together, so a weak one can be carried by those after it.

Instead of stopping at the first rejected guess, every prefix of the chain is tested and the longest one that passes is kept.
Here pi_i is how much of the target's law of the prefix x_1..x_i the draft supplies. A prefix whose extensions were all dropped
is kept with probability h_i. On average, the rule keeps at least as many guesses as token-wise rejection.

    pi_0 = 1;   pi_i = min(1, pi_{i-1} p(x_i | x_<i) / q(x_i | x_<i))
    S_i = sum_v (pi_i p(v | x_<=i) - q(v | x_<=i))+;   h_i = S_i / (S_i + 1 - pi_i) for i < K;   h_K = pi_K
    tau = max{i : u_i < h_i}, or 0;   y ~ norm((pi_tau p(. | x_<=tau) - q(. | x_<=tau))+), or p if tau = K

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444. Lossless for guesses sampled from
exactly the q that is given here. It stops because of guesses that it then drops, so a later round must not use its random
numbers again.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.paths import chain_verdict, last_nodes, path_of, row_at
from outrider.acceptance.residual import draw, draw_row, ratio, surplus
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict


@final
class Block(AcceptanceRule):
    """Keep the longest prefix that passes."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.CHAIN
    lossless: ClassVar = True

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        last = len(row.tokens) - 1
        supply = _supply_row(row)
        for node in range(last, -1, -1):  # the largest index first, so that the first success is the answer
            p = row.p[node]
            if node == last:
                owed, keep = p, supply[node]
            else:
                assert row.q is not None, "sampled guesses come with their q"
                owed = surplus(supply[node] * p, row.q[node])
                missing = float(owed.sum()) + 1 - supply[node]
                keep = float(owed.sum()) / missing if missing > 0 else 1.0
            if node == 0 or source.bernoulli(keep, node):
                return RowVerdict(path_of(row, node), draw_row(owed, p, source), rejected=node < last)
        raise AssertionError("the empty prefix always passes")

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, p = draft.tree, law.probs
        assert tree.is_chain, "this rule walks chains"
        assert draft.q is not None or tree.num_nodes == 1, "sampled guesses come with their q"
        q = p if draft.q is None else draft.q
        supply = _supply(tree.tokens, p, q)
        total = surplus(supply[..., None] * p, q).sum(-1)
        missing = total + 1 - supply
        keep = torch.where(missing > 0, total / missing, 1.0)
        nodes = torch.arange(tree.num_nodes, device=p.device).expand(tree.batch_size, -1)
        last = last_nodes(tree)[:, None]
        passed = noise.uniform(Purpose.ACCEPT, nodes) < torch.where(nodes < last, keep, supply)
        ends = (nodes * (passed & (nodes <= last))).amax(1)  # 0, the root, where nothing passes
        p_end = row_at(p, ends)
        owed = surplus(supply.gather(1, ends[:, None]) * p_end, row_at(q, ends))
        complete = ends[:, None] == last  # where nothing was guessed q means nothing
        return chain_verdict(tree, ends, draw(torch.where(complete, p_end, owed), p_end, noise))


def _supply_row(row: RowDraft) -> list[float]:
    """pi_0 .. pi_K."""
    supply = [1.0]
    for node, guess in enumerate(row.tokens[1:]):
        assert row.q is not None, "sampled guesses come with their q"
        supply.append(ratio(supply[-1] * float(row.p[node, guess]), float(row.q[node, guess])))
    return supply


def _supply(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """[B, N] the same for a batch. A guess with p >= q has full supply unless p is 0, so zeros are never divided."""
    guesses = tokens[:, 1:, None]
    p_guess, q_guess = p[:, :-1].gather(2, guesses)[..., 0], q[:, :-1].gather(2, guesses)[..., 0]
    supply = [torch.ones_like(p[:, 0, 0])]
    for p_next, q_next in zip(p_guess.unbind(1), q_guess.unbind(1), strict=True):
        scaled = supply[-1] * p_next
        supply.append(torch.where(scaled < q_next, scaled / q_next, (scaled > 0).to(scaled.dtype)))
    return torch.stack(supply, 1)
