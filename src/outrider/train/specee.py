"""Trains SpecEE's predictors, which tell at which layer the target's final token is already known.

The target is frozen and reads texts it wrote. Every exit's likeliest token is compared with the target's. The exit's network
learns to predict from a few numbers whether they agree. The exit "asked before" is a random lower one, since drafting skips
some. How often each exit was the first right one is counted too, because drafting asks those exits. (Xu et al. 2025, arXiv
2504.08850.)

    label_l(t) = [argmax head(norm(h_l(t))) = argmax p(t)],        loss = mean over exits and places of BCE(chance_l, label_l)

A checkpoint is judged by the number of exits per position that are predicted rightly, from the lowest up to the first mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.models.exit_predictor import ExitPredictor, exit_features, exit_layers
from outrider.models.heads import PackedTexts
from outrider.train.objective import BatchOutcome, Objective

_MOST_EXITS = 16


@dataclass(frozen=True)
class SpecEESettings:
    """The exits with predictors, and the predictors' shape."""

    exits: tuple[int, ...] | str | None = None
    """Layers with a predictor ("2,4,8" on the command line). Default: about sixteen, evenly spaced."""
    num_tokens: int = 4
    """Number of an exit's likeliest tokens that its predictor reads."""
    width: int = 64
    """Hidden size of a predictor (the paper: 512)."""
    chunk: int = 1 << 24
    """Most logits in memory at a time."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.width < 1:
            raise OptionError(
                f"num_tokens = {self.num_tokens}, width = {self.width} are not valid; use whole numbers of at least 1"
            )


@final
class SpecEEObjective(Objective):
    """Trains a network per exit to predict whether the exit is right."""

    name = "specee"

    def __init__(self, target: Target, settings: SpecEESettings) -> None:
        if settings.num_tokens > target.vocab_size:
            raise OptionError(f"num_tokens = {settings.num_tokens} is not valid; use at most {target.vocab_size}")
        self.target, self.settings = target, settings
        self.taps = exit_layers(settings.exits, target.num_layers, most=_MOST_EXITS)
        torch.manual_seed(0)
        predictor = ExitPredictor(self.taps, num_tokens=settings.num_tokens, width=settings.width)
        self.predictor = self.module = predictor.to(target.device)
        self._hidden_size = 0

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        valid, self._hidden_size = batch.valid(0), batch.last.shape[-1]
        places = valid.flatten().nonzero()[:, 0]
        exits = batch.features.flatten(0, 1)[places].unflatten(-1, (len(self.taps), -1))
        last, size = batch.last.flatten(0, 1)[places], self.settings.chunk // self.target.vocab_size
        size = max(1, size // (1 + len(self.taps)))
        total, right = exits.new_zeros((), dtype=torch.float32), list[Tensor]()
        for begin in range(0, len(places), size):
            loss, judged = self._chunk(exits[begin : begin + size], last[begin : begin + size])
            total = total + loss
            right.append(judged)
        hits = torch.zeros(len(self.taps), valid.numel(), dtype=torch.bool, device=valid.device)
        if right:
            hits[:, places] = torch.cat(right, 1)
        return BatchOutcome(total / max(1, len(places)), [hit.view_as(valid) for hit in hits], [valid] * len(self.taps))

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.predictor.save(folder, self.target, self._hidden_size, notes)

    def verdict(self, length: float) -> str:
        """Explains the loop's "accepted length", which is not one here: it is one more than the number of right
        predictions."""
        return f"{length - 1:.2f} of {len(self.taps)} exits judged rightly before the first mistake (held out), by exit"

    def _chunk(self, exits: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over positions of the exits' mean loss, and [E, P] where predictions are right; ``exits`` is [P, E, H]."""
        with torch.no_grad():
            wanted = self.target.logits(last).argmax(-1)
            said = [self.target.logits(states.to(last.dtype)) for states in exits.unbind(1)]
            label = torch.stack([logits.argmax(-1) == wanted for logits in said])
            seen = [exit_features(logits, self._earlier(said, i), self.settings.num_tokens) for i, logits in enumerate(said)]
        if self.module.training:
            self._count(label)
        odds = torch.stack([self.predictor(i, features) for i, features in enumerate(seen)]).float()
        losses = F.binary_cross_entropy_with_logits(odds, label.float(), reduction="none")
        return losses.mean(0).sum(), (odds > 0) == label

    def _earlier(self, said: list[Tensor], index: int) -> Tensor | None:
        """The likeliest tokens of a lower exit: in training any or none, otherwise the next one."""
        below = int(torch.randint(-1, index, ())) if self.module.training and index else index - 1
        return None if below < 0 else said[below]

    def _count(self, label: Tensor) -> None:
        """Count the lowest right exit of each position, from [E, P]."""
        first = label & (label.int().cumsum(0) == 1)
        self.predictor.first_right += first.sum(1)
