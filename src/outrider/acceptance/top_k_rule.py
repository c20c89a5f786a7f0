"""Top-k acceptance: a guess among the target's k likeliest tokens is right enough.

Blockwise parallel decoding keeps a guess that is one of the k best tokens; with k = 1 at temperature 0 that is greedy
verification. Here a guess outside the best k takes the exact test instead of being refused, so k = 0 is the exact rule. Tokens
tied with the k-th likeliest count as among the best.

    keep x  iff  fewer than k tokens have a larger p than x, and p(x) > 0;    else with probability p(x), as ``delta``

Stern, Shazeer & Uszkoreit 2018, "Blockwise Parallel Decoding for Deep Autoregressive Models", arXiv 1811.03115. What is lost: a
kept guess x replaces all other tokens of the target, so one step is off by up to 1 - p(x). For a sampled target this is so even
with k = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.acceptance.gated import GatedRule
from outrider.core.errors import OptionError


@dataclass(frozen=True)
class TopKOptions:
    """How far down the target's ranking a guess may be."""

    accept_top_k: int = 2
    """Guesses among the target's ``accept_top_k`` likeliest tokens are kept; 0 is exact."""

    def __post_init__(self) -> None:
        if not isinstance(self.accept_top_k, int) or self.accept_top_k < 0:
            raise OptionError(f"accept_top_k = {self.accept_top_k} is not valid; use a whole number, 0 for the exact rule")


@final
class TopK(GatedRule):
    """Keep a guess among the target's k likeliest tokens."""

    def __init__(self, options: TopKOptions | None = None) -> None:
        self.options = options or TopKOptions()

    def limit(self, judged: Tensor) -> Tensor:
        k = min(self.options.accept_top_k, judged.shape[-1])
        if k == 0:
            return torch.full_like(judged[..., 0], torch.inf)
        return judged.topk(k, -1).values[..., -1]
