"""What the target says of a tree: logits at every node, and the hidden states a drafter asked to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """The result of one target pass over B trees of N nodes."""

    logits: Tensor
    """[B, N, V] raw logits of the token that would follow each node."""
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    """[B, N, H] hidden states by layer: tap i is the residual stream entering layer i, tap L the last layer's output."""
