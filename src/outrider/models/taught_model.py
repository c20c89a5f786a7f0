"""Modules that are trained on the target's laws at every position: a draft model, or a part that predicts tokens from the
target's own states.

states = student(batch),      q(t) = softmax(student.logits(states)(t))  ~  p(t),  the target's law after place t
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.models.heads.head import PackedTexts


class Student(nn.Module, ABC):
    """A module that predicts the token after every position."""

    taps: tuple[int, ...] = ()
    """Target layers it reads."""

    @abstractmethod
    def forward(self, batch: PackedTexts) -> Tensor:
        """[R, L, H] states of packed texts."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """[..., V] logits of its states."""

    @abstractmethod
    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """A folder, written whole or not at all."""
