"""What shapes the laws of B requests, as values that code outside Python can read: temperatures, cuts, bias and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """The truncations of one request, applied in this order."""

    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


@dataclass(frozen=True, eq=False)
class Counted:
    """The penalties of B requests, with their token counts."""

    penalties: Tensor
    """[B, 3] float32: repetition, presence, frequency."""
    in_output: Tensor
    """[B, V] float32 occurrences."""
    in_prompt: Tensor
    """[B, V] bool."""


@dataclass(frozen=True, eq=False)
class Minimum:
    """The minimum lengths of B texts."""

    missing: Tensor
    """[B] int64 tokens until a text may end."""
    ends: Tensor
    """[B, V] bool, true for the tokens that end it."""


@dataclass(frozen=True, eq=False)
class Tempering:
    """Sampling parameters of B requests, except grammars and user functions."""

    temperatures: Sequence[float]
    """0 for greedy."""
    cuts: Sequence[Cut] | None = None
    """None if no request truncates."""
    bias: Tensor | None = None
    """[B, V] float32, added to logits."""
    minimum: Minimum | None = None
    counted: Counted | None = None

    @property
    def is_plain(self) -> bool:
        """Whether only temperatures are used."""
        return self.cuts is None and self.bias is None and self.minimum is None and self.counted is None
