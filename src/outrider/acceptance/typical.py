"""Typical acceptance: a guess is kept when it is not much less likely than a typical token of the target. LOSSY.

Where the target is sure (low entropy H) a guess must be likely. Where many tokens are possible, almost any of them passes. The
longest path of passing guesses is accepted; of equally long ones the likelier. The token after it is drawn from p. The tests
need neither random numbers nor q, so any tree will do.

    keep x  iff  p(x) > min(epsilon, delta exp(-H(p)));     y ~ p after the longest kept path

Cai et al. 2024, "Medusa", arXiv 2401.10774 (epsilon 0.09, delta 0.3 = sqrt(epsilon)). What is lost: where a guess passes, the
emitted law is that of the *guesses*. With one guess x ~ q, out(v) = q(v) [v passes] + p(v) q(tokens that do not pass). At
temperature 0 p is a point mass and only the argmax passes: greedy text is unchanged. With epsilon = delta = inf nothing passes,
which is plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.lossy import LossyRule, OneGuess
from outrider.acceptance.paths import chain_verdict, first_run, path_of, row_at, tree_verdict
from outrider.acceptance.residual import draw, draw_row
from outrider.acceptance.siblings import given_to
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict


@dataclass(frozen=True)
class TypicalOptions:
    """The thresholds of typical acceptance."""

    epsilon: float = 0.09
    """A guess with more than this probability under the target always passes."""
    delta: float = 0.3
    """In a context of entropy H, a guess with more than delta exp(-H) passes too."""

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not value > 0:
                raise OptionError(f"{name} = {value} is not valid; use a positive number (inf for both is lossless)")


@final
class TypicalAcceptance(LossyRule):
    """Keep what is typical of the target."""

    exact_for: ClassVar = (Draws.DETERMINISTIC, Draws.IID, Draws.WITHOUT_REPLACEMENT)
    shape: ClassVar = Shape.TREE

    def __init__(self, options: TypicalOptions | None = None) -> None:
        self.options = options or TypicalOptions()

    def limit(self, p: Tensor) -> Tensor:
        """[...] the probability a guess must exceed, from laws [..., V]."""
        return (self.options.delta * (-entropy(p)).exp()).clamp(max=self.options.epsilon)

    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        """Judges by p at every temperature, as the paper does."""
        del judged
        limits = self.limit(row.p).tolist()
        reached = {0: (0, 0.0)}  # node -> depth, log-likelihood of its path
        for child in range(1, len(row.tokens)):
            parent = row.parents[child]
            given = float(row.p[parent, row.tokens[child]])
            if parent in reached and given > limits[parent]:
                depth, likelihood = reached[parent]
                reached[child] = (depth + 1, likelihood + float(torch.tensor(given, dtype=torch.float64).log()))
        end = max(reached, key=lambda node: (*reached[node], -node))
        p = row.p[end]
        return RowVerdict(path_of(row, end), draw_row(p, p, source), rejected=bool(row.children(end)))

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, probs = draft.tree, law.probs
        given = given_to(tree, probs)
        entered = given > self.limit(probs).gather(1, tree.parents[:, 1:])
        ends = first_run(tree, entered) if tree.is_chain else _likeliest(tree, entered, given)
        p = row_at(probs, ends)
        next_token = draw(p, p, noise)
        return chain_verdict(tree, ends, next_token) if tree.is_chain else tree_verdict(tree, ends, next_token)

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        del judged
        passed = q * (p > self.limit(p)[..., None])
        kept = passed.sum(-1)
        return OneGuess(passed + p * (1 - kept)[..., None], kept)


def entropy(p: Tensor) -> Tensor:
    """[...] entropy of laws [..., V], in nats. Tokens with probability 0 add nothing."""
    return -torch.where(p > 0, p * p.log(), 0.0).sum(-1)


def _likeliest(tree: TokenTree, entered: Tensor, given: Tensor) -> Tensor:
    """[B] the deepest reached node. Ties go to the likeliest path, then to the lowest index."""
    if tree.is_ragged:
        entered = entered & tree.valid[:, 1:]
    lost = (tree.ancestors[:, :, 1:] & ~entered[:, None]).any(-1)
    depths = tree.depths.masked_fill(lost, -1)
    longest = depths == depths.amax(1, keepdim=True)
    likelihood = torch.cat([torch.zeros_like(given[:, :1]), given.log()], 1)
    above, span = tree.parents.clamp(min=0), 1
    while span < tree.num_nodes:  # doubling: every node adds its span of ancestors, and equal paths add up equally
        likelihood = likelihood + likelihood.gather(1, above)
        above, span = above.gather(1, above), span * 2
    return likelihood.masked_fill(~longest, -torch.inf).argmax(1)
