"""Threshold acceptance: a guess the target finds likely enough is right enough.

A guess is kept outright when the target gives it at least ``threshold_single``; below that, the exact test is made easier by
dividing the target's probability by ``threshold_acc``. Both at 1 are the exact rule for chosen guesses. These are the two
options of SGLang's speculative sampling.

    keep x  iff  p(x) >= threshold_single   or   u (threshold_acc - sum of p over elders) < p(x)

What is lost: with one guess, one step is off by TV <= max(1 - threshold_single, 1 - threshold_acc). A guess kept outright
replaces at most the first share, and a token gets at most p(x) / threshold_acc. At temperature 0 the softmax of the logits is
judged: a near tie may be emitted instead of the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.acceptance.gated import GatedRule
from outrider.core.errors import OptionError


@dataclass(frozen=True)
class ThresholdRuleOptions:
    """The thresholds for keeping a guess."""

    threshold_single: float = 1.0
    """A guess with at least this probability under the target is kept outright; 1 is exact."""
    threshold_acc: float = 1.0
    """Other guesses are kept with p / threshold_acc instead of p; 1 is exact."""

    def __post_init__(self) -> None:
        for name, value in (("threshold_single", self.threshold_single), ("threshold_acc", self.threshold_acc)):
            if not 0 < value <= 1:
                raise OptionError(f"{name} = {value} is not valid; use a number above 0 and at most 1 (1 is lossless)")


@final
class ThresholdRule(GatedRule):
    """Keep a guess the target finds likely enough."""

    def __init__(self, options: ThresholdRuleOptions | None = None) -> None:
        self.options = options or ThresholdRuleOptions()

    def limit(self, judged: Tensor) -> Tensor:
        single = self.options.threshold_single
        # At exactly 1 the gate is shut: at temperature 0 two logits can be so close that both round to it.
        return torch.full_like(judged[..., 0], single if single < 1 else torch.inf)

    def share(self) -> float:
        return self.options.threshold_acc
