"""Predicts whether a guess is harmless: a linear head on the target's last state after the guess, rewritten to read
log-probabilities.

Judge decoding (Bachmann et al. 2025, arXiv 2501.19309) puts a linear head on the target's state at the guessed token. A rule
sees laws, not states. But logits are l = W s + c, with more tokens than dimensions, so states can be computed from laws. The
head w . s equals v . log p, with a vector v over the vocabulary for which c does not matter.

    W^T v = w,  1^T v = 0      ->      v . log p = w . s          harmless  iff  sigmoid(v . log p + b) > threshold
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.checkpoint import write_checkpoint
from outrider.models.load import read_config
from outrider.models.weights import SafetensorsFolder

_FLOOR = -30.0
"""Least log-probability that is read. Banned tokens have none."""


@dataclass(frozen=True, eq=False)
class JudgeHead:
    """The folded head."""

    vector: Tensor
    """[V], sums to 0."""
    bias: float

    def log_odds(self, probs: Tensor) -> Tensor:
        """[...] log-odds that the last guess before each law [..., V] is harmless."""
        return features(probs) @ self.vector.to(probs) + self.bias

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        config = {"outrider": {"kind": "judge", "vocab_size": len(self.vector)}}
        tensors = {"vector": self.vector.float().contiguous(), "bias": torch.tensor([self.bias])}
        write_checkpoint(folder, tensors, config=config, notes=notes)


def features(probs: Tensor) -> Tensor:
    """[..., V] the head's input from laws."""
    return probs.log().clamp(min=_FLOOR)


def basis_of(readout: Tensor) -> Tensor:
    """[V, H] columns that turn log-probabilities into the normalised last state, for an output matrix [V, H]."""
    constant = torch.ones(len(readout), 1, dtype=torch.float64)
    return torch.linalg.pinv(torch.cat([readout.double(), constant], 1))[:-1].T


def centred(vocab_size: int) -> Tensor:
    """[V, V] the basis of a model without an output matrix: log-probabilities less their mean."""
    return torch.eye(vocab_size, dtype=torch.float64) - 1 / vocab_size


def load_judge(folder: str) -> JudgeHead:
    path = Path(folder)
    own = read_config(path).get("outrider") or {}
    if own.get("kind") != "judge":
        raise ModelError(f"{folder} holds no judge; train one: outrider train judge --draft MODEL --data QUESTIONS")
    source = SafetensorsFolder(path)
    return JudgeHead(source.take("vector", own["vocab_size"]).double(), float(source.take("bias", 1)))
