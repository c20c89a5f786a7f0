"""Sorted training of a draft model: its nested exits learn the target's laws at once, for method ``s2d``.

SoFT, sorted fine-tuning (arXiv 2407.01955): for every exit n, the first n layers are a draft of their own with the one final
norm and head. Every step adds up the losses of all exits. The loss is the divergence from the target's law, as in ``distill``;
``loss=text`` is the paper's own.

    loss = mean over exits e of  mean_t D(p(t), q_e(t))

Checkpoints are judged by the accepted length of chains from exit ``judged_exit``, the last one by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.drafters.model.s2d import exits_of
from outrider.models.heads import PackedTexts
from outrider.train.distill import CHUNK, TEXT, DistillObjective, DistillSettings, chain_outcome
from outrider.train.divergence import divergence
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import BatchOutcome, Objective


@dataclass(frozen=True)
class SortedSettings:
    """The trained exits, and the settings of training."""

    exits: tuple[int, ...] | str | None = None
    """Exit layers of the draft ("1,2,4" on the command line). Default: 1/2, 3/4 and all of the layers."""
    judged_exit: int | None = None
    """Exit whose chains evaluate a checkpoint. Default: the last."""
    loss: str = "forward"
    num_depths: int = 4
    chunk: int = CHUNK
    recompute: bool = True

    def __post_init__(self) -> None:
        if self.loss != TEXT:
            divergence(self.loss)
        if self.num_depths < 1:
            raise OptionError(f"num_depths = {self.num_depths} is not valid; use a whole number from 1")


@final
class SortedObjective(Objective):
    """Trains a draft on the target's laws, at every exit."""

    name = "sorted"
    taps = ()

    def __init__(self, model: DraftLM, target: Target, settings: SortedSettings) -> None:
        if model.config.vocab_size != target.vocab_size:
            sizes = f"{model.config.vocab_size} tokens and the target {target.vocab_size}"
            raise ModelError(f"{model.origin} has {sizes}; use a draft of the same vocabulary")
        self.module, self.model, self.settings = model, model, settings
        self.exits = exits_of(settings.exits, model.config.num_layers)
        self._judged = settings.judged_exit or self.exits[-1]
        if self._judged not in self.exits:
            raise OptionError(f"judged_exit = {self._judged} is not valid; use an exit: {', '.join(map(str, self.exits))}")
        shared = DistillSettings(settings.loss, chunk=settings.chunk, recompute=settings.recompute)
        self._compare = DistillObjective(self.name, model, target, shared)

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        valid, losses = batch.valid(0), list[torch.Tensor]()
        judged = valid
        for layer, states in enumerate(self.model.climb(batch), 1):
            if layer in self.exits:
                found, hits = self._compare.places(batch, self.model.model.norm(states), self.model)
                losses.append((found * valid).sum() / valid.sum().clamp(min=1))
                judged = hits if layer == self._judged else judged
        return chain_outcome(batch, torch.stack(losses).mean(), judged, self.settings.num_depths)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.model.save(folder, {**notes, "sorted": {**vars(self.settings), "exits": self.exits}})
