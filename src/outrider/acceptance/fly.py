"""Deferred rejection: a refused guess is kept if the target was undecided there and accepts what follows it. LOSSY.

A target that would have chosen another token often continues as the draft does all the same. So a refused guess is kept if two
things hold. The target was undecided: the entropy of its likeliest tokens is high. And the target agrees with what follows:
each of the next guesses passes the exact test of ``delta``, given the refused guess.

    keep x_i  iff  u_i < p(x_i),   or   -sum over the k likeliest of p log p  >=  fly_entropy,
                                        u_j < p(x_j) for j = i+1 .. i+fly_window,   and   p(x_i) > 0

Li et al. 2025, "Training-Free Loosely Speculative Decoding" (FLy), arXiv 2511.22972; the gate of the k likeliest tokens and the
defaults are those of vLLM's documents. A guess with fewer than ``fly_window`` guesses after it takes the exact test, so drafts
must be longer than the window. An infinite ``fly_entropy`` is the exact rule.

What is lost: a kept guess stands for what the target would have said, up to 1 - p(x) in one step. The chance of a mistake
falls with the window and never reaches zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.acceptance.gated import GatedRule
from outrider.acceptance.lossy import OneGuess
from outrider.acceptance.paths import chain_verdict, first_run, guess_lanes, last_nodes, path_of, row_at
from outrider.acceptance.residual import draw, draw_row
from outrider.acceptance.siblings import given_to, without_children
from outrider.core.draft import Draft, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.rng import Noise, Purpose
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict, Verdict


@dataclass(frozen=True)
class FlyOptions:
    """When a refused guess is kept after all."""

    fly_entropy: float = 0.3
    """Least entropy, in nats, of the target's likeliest tokens; infinite is lossless."""
    fly_window: int = 6
    """Number of guesses after a refused one that must pass the exact test."""
    fly_top_k: int = 3
    """Number of likeliest tokens over which the entropy is computed."""

    def __post_init__(self) -> None:
        if not self.fly_entropy >= 0:
            raise OptionError(f"fly_entropy = {self.fly_entropy!r} is not valid; use a number from 0 (inf is lossless)")
        for name, value, least in (("fly_window", self.fly_window, 0), ("fly_top_k", self.fly_top_k, 1)):
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number from {least}")


@final
class Fly(GatedRule):
    """Keep a refused guess if the target was undecided and accepts the guesses after it."""

    shape: ClassVar = Shape.CHAIN

    def __init__(self, options: FlyOptions | None = None) -> None:
        self.options = options or FlyOptions()

    def limit(self, judged: Tensor) -> Tensor:
        """Every token with a positive probability passes where the target is undecided; no token passes elsewhere."""
        best = judged.topk(min(self.options.fly_top_k, judged.shape[-1]), -1).values
        entropy = -torch.where(best > 0, best * best.log(), 0.0).sum(-1)
        return torch.where(entropy >= self.options.fly_entropy, 0.0, math.inf).to(judged.dtype)

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        tree, probs = draft.tree, law.probs
        passed = noise.uniform(Purpose.ACCEPT, guess_lanes(tree)) < given_to(tree, probs)
        undecided = self.gate(tree, self.judged_by(law))
        ends = first_run(tree, passed | (undecided & self._goes_along(tree, passed)))
        p = row_at(probs, ends)
        return chain_verdict(tree, ends, draw(without_children(tree, ends, p), p, noise))

    def judge_row(self, row: RowDraft, judged: Tensor, source: RandomSource) -> RowVerdict:
        undecided, tested = self.gate_row(row, judged), dict[int, bool]()

        def passes(node: int) -> bool:
            if node not in tested:
                tested[node] = source.bernoulli(float(row.p[node - 1, row.tokens[node]]), node)
            return tested[node]

        node, last = 0, len(row.tokens) - 1
        while node < last:
            behind = range(node + 2, node + 2 + self.options.fly_window)
            if not passes(node + 1) and not (undecided[node + 1] and behind.stop <= last + 1 and all(map(passes, behind))):
                break
            node += 1
        rest = row.p[node].clone()
        rest[[row.tokens[child] for child in row.children(node)]] = 0
        return RowVerdict(path_of(row, node), draw_row(rest, row.p[node], source), rejected=node < last)

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        """A guess that nothing follows takes the exact test, unless the window is empty."""
        if self.options.fly_window:
            return self._outcome(p, q, torch.zeros_like(p, dtype=torch.bool))
        return super().one_guess(p, q, judged=judged)

    def _goes_along(self, tree: TokenTree, passed: Tensor) -> Tensor:
        """[B, N - 1] whether a whole window of guesses follows each one, and all of them pass."""
        window, count = self.options.fly_window, passed.shape[1]
        inside = torch.arange(1, count + 1, device=passed.device) <= last_nodes(tree)[:, None]
        sums = torch.nn.functional.pad((passed & inside).long().cumsum(1), (0, window), value=-1)
        return sums[:, window:] - sums[:, :count] == window
