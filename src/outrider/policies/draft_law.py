"""The drafter's own probabilities, as stopping rules read them.

They are taken from the drafter's logits after penalties, biases and bans but before temperature and truncation. The law that a
guess is really drawn from is a point mass in greedy decoding, and would call every guess certain. A stopping decision may rest
on anything (Lemma C of docs/lossless.md), so this is a matter of usefulness, not of exactness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.sampling import Law


def probability_of(law: Law, guesses: Tensor) -> list[float]:
    """The drafter's probability of each row's guess [B]."""
    log_probs = law.adjusted[:, -1].log_softmax(-1)
    return log_probs.gather(-1, guesses[:, None])[:, 0].exp().tolist()


def entropy_of(law: Law) -> list[float]:
    """Entropy of each row's law, in nats."""
    return torch.special.entr(law.adjusted[:, -1].softmax(-1)).sum(-1).tolist()
