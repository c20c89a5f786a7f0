"""The settings of a training run (length, learning rate), and the training state of one objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from outrider.core.errors import ModelError, OptionError
from outrider.models.heads import PackedTexts
from outrider.train.devices import Team, gathered
from outrider.train.objective import BatchOutcome, Objective, accepted_length
from outrider.train.plot import acceptance_plot


@dataclass(frozen=True)
class Settings:
    """Length and learning rate of a run."""

    max_steps: int = 1000
    max_seconds: float | None = None
    """Time limit. The learning rate follows the larger used share, of steps or of time."""
    batch_size: int = 16
    """Documents per step."""
    row_len: int = 512
    """Positions per packed row."""
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    final_rate: float = 0.05
    """Final learning rate, as a share of the highest."""
    bf16: bool = False
    """Compute products in bfloat16; weights stay float32."""
    judge_every: int = 100
    save_every: int = 100
    patience: int = 10
    """Evaluations without a better accepted length after which a method stops."""
    seed: int = 0
    store: str | None = None
    """Folder or URL of an object store (``s3://...``) for the target's states of the corpus, so that every text passes
    the target once."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "row_len", "judge_every", "save_every", "patience"):
            if vars(self)[name] < 1:
                raise OptionError(f"{name} = {vars(self)[name]} is not valid; use a whole number of at least 1")
        if not self.learning_rate > 0:
            raise OptionError(f"learning_rate = {self.learning_rate} is not valid; use a number above 0")


@final
@dataclass(eq=False)
class Run:
    """The training state of one objective."""

    objective: Objective
    folder: Path
    call: Callable[[PackedTexts], BatchOutcome]
    """The objective, sharded if there are many devices."""
    optimizer: torch.optim.Optimizer
    team: Team
    best: float = 0.0
    since_best: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.since_best < 0

    def learn(self, loss: torch.Tensor, settings: Settings, step: int) -> float:
        """One optimizer step. A loss that is not a number is refused before it can spoil the weights."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ModelError(
                f"{self.objective.name}: the loss of step {step} is {value}; {self.folder} holds the last good checkpoint: "
                "resume with a lower learning_rate, or without bf16"
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.objective.module.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def judge(self, outcomes: Sequence[BatchOutcome], step: int, settings: Settings, notes: dict[str, Any]) -> float:
        """Evaluate the accepted length on the held-out documents, and keep the best checkpoint."""
        length = accepted_length(outcomes)
        rates = sum(outcome.rates().double() for outcome in outcomes)
        assert isinstance(rates, torch.Tensor)
        shares = (rates[:, 0] / rates[:, 1].clamp(min=1)).tolist()
        self.history.append({"step": step, "accepted_length": round(length, 4), "by_depth": [round(s, 4) for s in shares]})
        self.since_best += 1
        if length > self.best:
            self.best, self.since_best = length, 0
            with gathered(self.objective.module):
                if self.team.is_first:
                    self._save({**notes, "step": step, "accepted_length": length, "history": self.history})
        if self.since_best >= settings.patience:
            self.since_best = -1
        return length

    def _save(self, notes: dict[str, Any]) -> None:
        self.objective.save(self.folder, notes)
        title = f"{self.objective.name}: {self.objective.verdict(self.history[-1]['accepted_length'])}"
        acceptance_plot(self.folder / "acceptance.svg", title, self.history)
