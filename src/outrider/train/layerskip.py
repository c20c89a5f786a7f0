"""LayerSkip: trains the target itself, so that its early layers predict tokens and it depends less on its late layers.

Rows skip layers at random, late layers more often. The loss is computed at every exit, through the same final norm and head
(Elhoushi et al. 2024, arXiv 2404.16710). The result is an ordinary checkpoint for ``early-exit``, ``kangaroo`` and ``del``. It
is *another target*, and speculation with it is lossless with respect to itself. Every exit learns the law of the target before
training, so the text stays close to what it was. ``loss=text`` is the paper's own loss.

    p(row skips layer l) = p_max (exp(l ln 2 / (L - 1)) - 1)                                   l = 0 .. L - 1, rows independent
    loss = sum_l w_l D(p, q_l) / sum_l w_l,   w_l = scale * sum_{i <= l} i  for exits,  w_last = L - 1 + sum_{i < L} i

Rotation: every step trains one exit in R, a different one each time, and always the last layer. Checkpoints are judged by the
accepted length of a chain from exit ``judged_exit``, compared with the model's own last layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.models.heads import PackedTexts
from outrider.train.data import Document
from outrider.train.distill import TEXT, DistillObjective, DistillSettings, chain_outcome
from outrider.train.divergence import divergence
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import BatchOutcome, Objective


@dataclass(frozen=True)
class LayerSkipSettings:
    """How often layers are skipped, and the weight of the exits."""

    max_dropout: float = 0.1
    """p_max: probability that a row skips the last layer."""
    scale: float = 0.2
    """Weight of the exits relative to the last layer."""
    rotation: int = 8
    """R: one exit in this many is trained at each step."""
    judged_exit: int | None = None
    """Exit whose chains evaluate a checkpoint. Default: half of the layers."""
    loss: str = "forward"
    num_depths: int = 4
    chunk: int = 1 << 24
    recompute: bool = True

    def __post_init__(self) -> None:
        if self.loss != TEXT:
            divergence(self.loss)
        if not 0 <= self.max_dropout < 1 or self.scale < 0 or self.rotation < 1 or self.num_depths < 1:
            found = f"max_dropout = {self.max_dropout}, scale = {self.scale}, rotation = {self.rotation}"
            raise OptionError(f"{found} are not valid; use a share below 1, a weight of 0 or more, and whole numbers from 1")


def dropout_rates(num_layers: int, highest: float) -> list[float]:
    """Probability of skipping each layer: 0 for the first, ``highest`` for the last, growing exponentially between."""
    return [highest * (math.exp(layer * math.log(2) / max(1, num_layers - 1)) - 1) for layer in range(num_layers)]


def exit_weights(num_layers: int, scale: float) -> list[float]:
    """Unnormalised weight of the loss after each layer."""
    sums = [layer * (layer + 1) / 2 for layer in range(num_layers)]
    return [*(scale * weight for weight in sums[:-1]), num_layers - 1 + sums[-1]]


@final
class LayerSkipObjective(Objective):
    """Trains a target on the laws of its own initial state, at every exit."""

    name = "layerskip"
    taps = ()

    def __init__(self, model: DraftLM, target: Target, settings: LayerSkipSettings) -> None:
        self.module, self.model, self.settings = model, model, settings
        count = model.config.num_layers
        exit_layer = settings.judged_exit or max(1, count // 2)
        if not 1 <= exit_layer < count:
            raise OptionError(f"judged_exit = {exit_layer} is not valid; the target has {count} layers, use 1 to {count - 1}")
        self._exit = exit_layer
        self._rates, self._weights = dropout_rates(count, settings.max_dropout), exit_weights(count, settings.scale)
        shared = DistillSettings(settings.loss, chunk=settings.chunk, recompute=settings.recompute)
        self._compare = DistillObjective(self.name, model, target, shared)
        self._turn = 0

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        """The documents unchanged. The step decides which exits are trained."""
        self._turn = step
        return documents

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        return self._learn(batch) if self.module.training else self._judge(batch)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.model.save(folder, {**notes, "layerskip": vars(self.settings)})

    def _learn(self, batch: PackedTexts) -> BatchOutcome:
        count, valid = self.model.config.num_layers, batch.valid(0)
        kept = [torch.rand(len(batch.tokens), device=valid.device) >= rate for rate in self._rates]
        asked = {*range(self._turn % self.settings.rotation, count - 1, self.settings.rotation), count - 1}
        total, weights, hits = batch.last.new_zeros((), dtype=torch.float32), 0.0, valid
        for layer, states in enumerate(self.model.climb(batch, kept)):
            if layer in asked and self._weights[layer]:
                losses, hits = self._compare.places(batch, self.model.model.norm(states), self.model)
                total = total + self._weights[layer] * (losses * valid).sum() / valid.sum().clamp(min=1)
                weights += self._weights[layer]
        return chain_outcome(batch, total / weights, hits, self.settings.num_depths)

    def _judge(self, batch: PackedTexts) -> BatchOutcome:
        """The positions at which an exit and the last layer agree."""
        states = list(self.model.climb(batch))
        early, late = (self._likeliest(state) for state in (states[self._exit - 1], states[-1]))
        return chain_outcome(batch, batch.last.new_zeros((), dtype=torch.float32), early == late, self.settings.num_depths)

    def _likeliest(self, states: Tensor) -> Tensor:
        """[R, L] the likeliest tokens, computed a few positions at a time to bound memory."""
        flat, size = self.model.model.norm(states).flatten(0, 1), max(1, self.settings.chunk // self.model.config.vocab_size)
        parts = [self.model.logits(flat[begin : begin + size]).argmax(-1) for begin in range(0, len(flat), size)]
        return torch.cat(parts).view(states.shape[:2])
