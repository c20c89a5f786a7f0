"""The one training loop. Several methods may share it, and with it the target's passes, which are most of the work.

A step: documents -> the target's states -> every objective's loss -> its own clipped AdamW step. Now and then the held-out
documents are judged by accepted length, which is what counts and does not follow the loss; the best checkpoint by it is
kept, and a method that has not improved for a while stops. What is needed to go on exactly is saved beside: a kill loses at
most one save interval.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from tqdm import tqdm

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.models.heads import Packed
from outrider.train.data import Corpus, Document
from outrider.train.devices import Team, current_team, gathered
from outrider.train.features import Rows, compute
from outrider.train.objective import Objective, Outcome, accepted_length
from outrider.train.plot import acceptance_plot
from outrider.train.state import load_state, save_state
from outrider.train.stored import FeatureStore


@dataclass(frozen=True)
class Settings:
    """How long and how fast."""

    max_steps: int = 1000
    max_seconds: float | None = None
    """Ends the run earlier; the learning rate falls with the larger share that is gone."""
    batch_size: int = 16
    """Documents per step."""
    row_len: int = 512
    """Places per packed row."""
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    final_rate: float = 0.05
    """Of the learning rate, at the end."""
    bf16: bool = False
    """Multiply in bfloat16; weights stay float32."""
    judge_every: int = 100
    save_every: int = 100
    patience: int = 10
    """Judgements without a better accepted length after which a method stops."""
    seed: int = 0
    store: str | None = None
    """Folder in which the target's states of the corpus are kept, so that every text goes through the target once."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "row_len", "judge_every", "save_every", "patience"):
            if vars(self)[name] < 1:
                raise OptionError(f"{name} = {vars(self)[name]} is not valid; use a whole number of at least 1")
        if not self.learning_rate > 0:
            raise OptionError(f"learning_rate = {self.learning_rate} is not valid; use a number above 0")


@final
@dataclass(eq=False)
class Run:
    """One objective while it learns."""

    objective: Objective
    folder: Path
    call: Callable[[Packed], Outcome]
    """The objective, divided where there are many devices."""
    optimizer: torch.optim.Optimizer
    team: Team
    best: float = 0.0
    since_best: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.since_best < 0

    def learn(self, loss: torch.Tensor, settings: Settings, step: int) -> float:
        """One step down; refuses a loss that is not a number before it can spoil the weights."""
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

    def judge(self, outcomes: Sequence[Outcome], step: int, settings: Settings, notes: dict[str, Any]) -> float:
        """Accepted length on the held-out documents; keeps the best checkpoint."""
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
        acceptance_plot(self.folder / "acceptance.svg", self.objective.name, self.history)


def train(
    objectives: Sequence[Objective],
    target: Target,
    corpus: Corpus,
    out: Path,
    *,
    settings: Settings | None = None,
    notes: dict[str, Any] | None = None,
    progress: bool = False,
) -> list[Run]:
    """Train all objectives on the same batches; the checkpoint of each is in ``out/NAME``. Goes on where an earlier call
    ended. In a process group (``torchrun``) the work is divided among its processes."""
    settings, team = settings or Settings(), current_team()
    torch.manual_seed(settings.seed + team.rank)
    runs = [_run(objective, out / objective.name, settings, team) for objective in objectives]
    loop = _Loop(runs, target, corpus, settings, {"settings": asdict(settings), **(notes or {})})
    step, elapsed = load_state(out, runs, asdict(settings))
    loop.began = time.monotonic() - elapsed
    with tqdm(total=settings.max_steps, initial=step, disable=not (progress and team.is_first), unit="step") as bar:
        while (share := loop.share(step)) < 1 and any(not run.is_done for run in runs):
            losses = loop.step(step, share)
            step += 1
            bar.update()
            bar.set_postfix({name: f"{loss:.3f}" for name, loss in losses.items()}, refresh=False)
            if step % settings.judge_every == 0:
                loop.judge(step, say=bar.write if progress else None)
            if step % settings.save_every == 0:
                save_state(out, runs, step, time.monotonic() - loop.began, asdict(settings))
    loop.judge(step, say=None)
    save_state(out, runs, step, time.monotonic() - loop.began, asdict(settings))
    return runs


def _run(objective: Objective, folder: Path, settings: Settings, team: Team) -> Run:
    call = team.divided(objective)  # before the optimizer looks at the parameters
    return Run(objective, folder, call, _optimizer(objective.module, settings), team)


def _optimizer(module: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Matrices decay, norms do not; what is frozen is left out."""
    learned = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in learned if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, 0.95), fused=learned[0].is_cuda
    )


@final
class _Loop:
    """Batches, losses and judgements of all runs."""

    def __init__(self, runs: Sequence[Run], target: Target, corpus: Corpus, settings: Settings, notes: dict[str, Any]) -> None:
        self.runs, self.target, self.corpus, self.settings, self.notes = runs, target, corpus, settings, notes
        self.began = time.monotonic()
        self._taps = sorted({tap for run in runs for tap in run.objective.taps})
        self._team = runs[0].team
        place = None if settings.store is None else Path(settings.store) / str(self._team.rank)
        self._store = None if place is None else FeatureStore(place, target, self._taps)
        self._known = {id(document) for document in (*corpus.train, *corpus.held_out)} if self._store else set[int]()

    def share(self, step: int) -> float:
        """Of the run that is over."""
        settings = self.settings
        over = self._team.agree(time.monotonic() - self.began) / settings.max_seconds if settings.max_seconds else 0.0
        return max(step / settings.max_steps, over)

    def step(self, step: int, share: float) -> dict[str, float]:
        settings = self.settings
        warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
        rate = settings.learning_rate * warm * (settings.final_rate + (1 - settings.final_rate) * (1 - share))
        documents: Sequence[Document] = self._team.share_of(self.corpus.batch(step, settings.batch_size, settings.seed))
        for run in self.runs:
            documents = run.objective.write(documents, step)
        losses: dict[str, float] = {}
        for run, outcome in self._outcomes(documents):
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            losses[run.objective.name] = run.learn(outcome.loss, settings, step)
        return losses

    def judge(self, step: int, *, say: Callable[[str], object] | None) -> None:
        held, found = self.corpus.held_out, dict[str, list[Outcome]]()
        for run in self.runs:
            run.objective.module.eval()
        with torch.no_grad():
            for begin in range(0, len(held), self.settings.batch_size):
                for run, outcome in self._outcomes(held[begin : begin + self.settings.batch_size]):
                    found.setdefault(run.objective.name, []).append(outcome)
        for run in self.runs:
            run.objective.module.train()
            if run.objective.name in found:
                length = run.judge(found[run.objective.name], step, self.settings, self.notes)
                if say is not None:
                    say(f"step {step}: {run.objective.name} {length:.3f} tokens per pass, {run.history[-1]['by_depth']}")

    def _outcomes(self, documents: Sequence[Document]) -> Iterator[tuple[Run, Outcome]]:
        """Every live run's outcome on the same documents, one after the other: no two are in memory at once."""
        last, device = self.target.num_layers, self.target.device
        rows = Rows(self._states(documents), documents, row_len=self.settings.row_len, last=last)
        for run in self.runs:
            if not run.is_done:
                with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.bf16):
                    outcome = run.call(rows.packed(run.objective.taps))
                yield run, outcome

    def _states(self, documents: Sequence[Document]) -> dict[int, list[torch.Tensor]]:
        """From the store, if all of them are the corpus's own."""
        if self._store is not None and all(id(document) in self._known for document in documents):
            return self._store.states(documents)
        return compute(self.target, documents, self._taps)
