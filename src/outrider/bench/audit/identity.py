"""Compares a text with plain decoding's, and explains every difference.

The two runs are compared token by token. At the first difference, the scores of each run's own pass tell three causes apart.

- *Rule*: the emitted token is not the choice that the method's own scores make. That is a bug.
- *Scores*: the two passes disagree by more than rounding can explain. A mask, a position or a cache is wrong.
- *Rounding*: the scores agree within this machine's rounding, and the two best choices are closer than that. Plain decoding
  with another batch size would part too.

The size of rounding is measured: plain decoding's own text is scored in wide passes from a fresh cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.bench.audit.findings import Finding, failed, passed
from outrider.bench.audit.traces import Trace, choice_scores
from outrider.core.params import SamplingParams

_MARGIN = 6.0
"""Factor by which a difference must exceed the measured noise to count as more than rounding."""
_LIMIT = {torch.float32: 0.01, torch.float64: 1e-6}
_COARSE_LIMIT = 0.5
"""Noise, in standard deviations of the logits, above which wide passes themselves are wrong (the second value is for 16-bit
types)."""


@dataclass(frozen=True)
class Rounding:
    """Differences between wide and narrow passes on this machine."""

    noise: float
    """Largest difference between logits."""
    spread: float
    """Standard deviation of the logits, for scale."""
    dtype: torch.dtype

    @property
    def bound(self) -> float:
        return _MARGIN * self.noise + 1e-5 * self.spread

    @property
    def plausible(self) -> bool:
        return self.noise <= _LIMIT.get(self.dtype, _COARSE_LIMIT) * self.spread


def measure_rounding(narrow: Sequence[Tensor], wide: Sequence[Tensor], dtype: torch.dtype) -> Rounding:
    differences = [float((a - b).abs().max()) for a, b in zip(narrow, wide, strict=False)]
    return Rounding(max(differences), float(torch.stack(list(narrow)).std()), dtype)


@dataclass(frozen=True)
class TextDivergence:
    """The first difference between two texts, and its cause."""

    prompt: int
    position: int
    plain_token: int
    token: int
    gap: float
    """Gap between the two tokens' scores in the plain run."""
    difference: float
    """Largest difference between the two passes' logits there."""
    cause: str

    def text(self) -> str:
        return (
            f"prompt {self.prompt}, position {self.position}: {self.token} instead of {self.plain_token}, gap {self.gap:.2g}, "
            f"passes differ by {self.difference:.2g}: {self.cause}"
        )


ROUNDING, SCORES, RULE = "rounding", "the passes disagree: mask, position or cache", "not the choice of its own scores: rule"


def explain(index: int, plain: Trace, other: Trace, *, params: SamplingParams, rounding: Rounding) -> TextDivergence | None:
    """The first difference between the texts; None if they are equal."""
    both = zip(plain.tokens, other.tokens, strict=False)
    position = next((i for i, (a, b) in enumerate(both) if a != b), None)
    if position is None:
        if len(plain.tokens) == len(other.tokens):
            return None
        position = min(len(plain.tokens), len(other.tokens)) - 1
    mine, theirs = plain.tokens[position], other.tokens[position]
    scores = choice_scores(plain.logits[position], position, params)
    own = choice_scores(other.logits[position], position, params)
    difference = float((plain.logits[position] - other.logits[position]).abs().max())
    gap = float(scores[mine] - scores[theirs])
    cause = ROUNDING
    if int(own.argmax()) != theirs or mine == theirs:
        cause = RULE
    elif difference > rounding.bound:
        cause = SCORES
    return TextDivergence(index, position, mine, theirs, gap, difference, cause)


def largest_difference(plain: Trace, other: Trace) -> float:
    """Largest difference of logits at the positions that both runs reached with the same text."""
    largest = 0.0
    for position, (mine, theirs) in enumerate(zip(plain.tokens, other.tokens, strict=False)):
        largest = max(largest, float((plain.logits[position] - other.logits[position]).abs().max()))
        if mine != theirs:
            break
    return largest


@dataclass(frozen=True)
class Compared:
    """Runs of several prompts against plain decoding."""

    count: int
    num_tokens: int
    divergences: tuple[TextDivergence, ...]
    largest: float


def judge_identity(part: str, compared: Compared, rounding: Rounding) -> Finding:
    """The finding: rounding is explained and passes, a wrong rule or wrong scores do not."""
    real = [one for one in compared.divergences if one.cause != ROUNDING]
    same = compared.count - len(compared.divergences)
    figures = f"{same} of {compared.count} texts identical ({compared.num_tokens} tokens)"
    data = {"texts": compared.count, "identical": same, "largest_difference": compared.largest, "rounding": rounding.noise}
    details = [one.text() for one in compared.divergences]
    if compared.largest > rounding.bound and not real:
        details.append(f"passes differ by {compared.largest:.2g} where wide passes differ by {rounding.noise:.2g}")
        return failed(part, f"{figures}, but the scores are not those of plain decoding", details, **data)
    if real:
        return failed(part, f"{figures}; {len(real)} divergences are not rounding", details, **data)
    explained = f", {len(details)} explained by rounding" if details else ""
    finding = passed(part, f"{figures}{explained}; scores agree to {compared.largest:.1g}", **data)
    return Finding(finding.part, finding.outcome, finding.said, details, finding.data)
