"""Judge decoding: a guess is kept when a trained head finds it harmless, or when the exact rule keeps it.

The head reads the target's law *after* the guess, which is a function of the target's last hidden state there
(``models/judge_head.py``). The target has read the guess already, so this costs no pass. Everything else is the exact rule for
chosen guesses.

    keep x  iff  sigmoid(v . log p(. | x) + b) > judge_threshold  and p(x) > 0,   or  u (1 - sum of p over elders) < p(x)

Bachmann et al. 2025, "Judge Decoding", arXiv 2501.19309. What is lost: a kept guess is emitted because it was proposed, with
whatever probability. Where the guess is certain (a greedy draft), one step is off by TV = [harmless] (1 - p(x)).
``judge_threshold`` 1 is the exact rule. The head reads untempered laws, so it judges alike at every temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.acceptance.gated import GatedRule
from outrider.acceptance.lossy import OneGuess
from outrider.acceptance.siblings import given_to
from outrider.core.errors import OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.sampling import Law
from outrider.core.tree import TokenTree
from outrider.models.judge_head import JudgeHead, load_judge


@dataclass(frozen=True)
class JudgeOptions:
    """The head, and how sure it must be."""

    judge: str = ""
    """Folder of a head, from `outrider train judge`."""
    judge_threshold: float = 0.5
    """A guess is kept when the head finds it harmless with more than this probability; 1 is lossless."""

    def __post_init__(self) -> None:
        if not 0 <= self.judge_threshold <= 1:
            raise OptionError(f"judge_threshold = {self.judge_threshold} is not valid; use 0 to 1 (1 is lossless)")


@final
class Judge(GatedRule):
    """Keep what a head finds harmless."""

    def __init__(self, options: JudgeOptions | None = None, *, head: JudgeHead | None = None) -> None:
        self.options = options or JudgeOptions()
        if head is None and not self.options.judge:
            raise OptionError("rule 'judge' needs a trained head; train one with `outrider train judge`, then give judge=DIR")
        self.head = head or load_judge(self.options.judge)
        threshold = self.options.judge_threshold
        self._least = math.inf if threshold == 1 else -math.inf if threshold == 0 else math.log(threshold / (1 - threshold))

    def limit(self, judged: Tensor) -> Tensor:
        """Infinite, so that no probability passes: this gate judges by the law after the guess."""
        return torch.full(judged.shape[:-1], math.inf, dtype=judged.dtype, device=judged.device)

    def judged_by(self, law: Law) -> Tensor:
        return law.adjusted.softmax(-1)

    def gate(self, tree: TokenTree, judged: Tensor) -> Tensor:
        return self._harmless(judged)[:, 1:] & (given_to(tree, judged) > 0)

    def gate_row(self, row: RowDraft, judged: Tensor) -> list[bool]:
        harmless = self._harmless(judged).tolist()
        possible = [float(judged[parent, token]) > 0 for token, parent in zip(row.tokens[1:], row.parents[1:], strict=True)]
        return [False, *(fine and can for fine, can in zip(harmless[1:], possible, strict=True))]

    def one_guess(self, p: Tensor, q: Tensor, *, judged: Tensor | None = None) -> OneGuess:
        """Approximates the law after the guess by the law before it, the only one known here."""
        judged = p if judged is None else judged
        return self._outcome(p, q, self._harmless(judged)[..., None] & (judged > 0))

    def _harmless(self, judged: Tensor) -> Tensor:
        """[..., N] whether the head finds each node's own token harmless."""
        return self.head.log_odds(judged) > self._least
