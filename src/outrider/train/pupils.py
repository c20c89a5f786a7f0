"""Drafters that can learn while they serve: a draft model, or trained heads.

A pupil defines the objective of its module, the target's states that it reads, and how a module is put into service. The rest
of online learning (``train/online.py``) is the same for all.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, cast, final

import torch
from torch import nn

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.models.heads import KINDS, Head
from outrider.train.distill import DistillObjective, DistillSettings
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import HeadObjective, HeadSettings, Objective
from outrider.train.sorted import SortedObjective, SortedSettings

Exits = tuple[int, ...] | str | None
"""Exit layers of a draft, as for method ``s2d``."""


@dataclass(frozen=True)
class Lesson:
    """The training settings of a module."""

    loss: str
    """Name of a divergence from the target's law. Heads with a loss of their own keep it."""
    chunk: int
    """Most logits in memory at a time."""


class Pupil(ABC):
    """A module that can learn while it serves."""

    module: nn.Module
    taps: tuple[int, ...] = ()
    """Target layers that it reads beside the last one."""

    @abstractmethod
    def objective(self, module: nn.Module) -> Objective:
        """The objective that trains and evaluates a copy of the module."""

    @abstractmethod
    def served(self, module: nn.Module) -> Any:
        """A copy of the module, ready to draft with."""

    def learning(self, module: nn.Module) -> nn.Module:
        """The module with gradients enabled where it learns. Changes it."""
        return module.requires_grad_(True).train()


class _ModelPupil(Pupil, ABC):
    """A draft model, served in ``dtype``."""

    def __init__(self, draft: DraftLM, target: Target, lesson: Lesson, dtype: torch.dtype) -> None:
        if draft.config.vocab_size != target.vocab_size:
            sizes = f"{draft.config.vocab_size} tokens and the target {target.vocab_size}"
            raise ModelError(f"the draft knows {sizes}; use a draft of the same vocabulary")
        self.module, self._target, self._lesson, self._dtype = draft, target, lesson, dtype

    def served(self, module: nn.Module) -> Target:
        return cast("DraftLM", module).served(self._dtype)


@final
class DraftPupil(_ModelPupil):
    """A draft model of the Llama kind."""

    def objective(self, module: nn.Module) -> Objective:
        settings = DistillSettings(loss=self._lesson.loss, chunk=self._lesson.chunk)
        return DistillObjective("online", cast("DraftLM", module), self._target, settings)


@final
class SortedPupil(_ModelPupil):
    """A draft model whose nested exits are drafts of their own."""

    def __init__(self, draft: DraftLM, target: Target, lesson: Lesson, dtype: torch.dtype, *, exits: Exits = None) -> None:
        super().__init__(draft, target, lesson, dtype)
        self._settings = SortedSettings(exits, loss=lesson.loss, chunk=lesson.chunk)

    def objective(self, module: nn.Module) -> Objective:
        return SortedObjective(cast("DraftLM", module), self._target, self._settings)


@final
class HeadPupil(Pupil):
    """Heads of any kind that ``outrider train`` can train. Parts shared with the target stay fixed."""

    def __init__(self, head: Head, target: Target, lesson: Lesson, dtype: torch.dtype | None = None) -> None:
        """They are served in ``dtype``, by default their own."""
        given = {"loss": lesson.loss, **KINDS[head.config.kind].training}
        names = {item.name for item in fields(HeadSettings)}
        self._settings = HeadSettings(**{name: value for name, value in given.items() if name in names})
        self.module, self.taps, self._target, self._chunk = head, head.config.taps, target, lesson.chunk
        self._dtype = dtype or next(head.parameters()).dtype

    def objective(self, module: nn.Module) -> Objective:
        return HeadObjective(cast("Head", module), self._target, self._settings, chunk=self._chunk)

    def served(self, module: nn.Module) -> Head:
        return cast("Head", copy.deepcopy(module)).requires_grad_(False).to(dtype=self._dtype).eval()

    def learning(self, module: nn.Module) -> nn.Module:
        super().learning(module)
        cast("Head", module).freeze()
        return module
