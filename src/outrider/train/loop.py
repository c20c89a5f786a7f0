"""The one training loop. Several methods may share it, and with it the target's passes, which are most of the work.

A step: documents -> the target's states -> every objective's loss -> its own clipped AdamW step. Now and then held-out
documents are judged by accepted length, which does not follow the loss. The best checkpoint by accepted length is kept. A
method that has not improved for a while stops. The state that resumes a run exactly is saved too, so a killed run loses at most
one save interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from tqdm import tqdm

from outrider.core.interfaces import Target
from outrider.train.data import Corpus, Document
from outrider.train.devices import Team, current_team
from outrider.train.features import DocumentRows, compute
from outrider.train.objective import BatchOutcome, Objective
from outrider.train.run import Run, Settings
from outrider.train.sharded import ShardedStore
from outrider.train.state import load_state, save_state
from outrider.train.stored import FeatureStore


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
    """Train all objectives on the same batches, with a checkpoint of each in ``out/NAME``. Resumes an earlier call. In a
    process group (``torchrun``) the work is divided among its processes."""
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
                loop.save(out, step)
    if loop.judged != step:
        loop.judge(step, say=None)
    loop.save(out, step)
    return runs


def _run(objective: Objective, folder: Path, settings: Settings, team: Team) -> Run:
    call = team.divided(objective)  # before the optimizer looks at the parameters
    return Run(objective, folder, call, _optimizer(objective.module, settings), team)


def _optimizer(module: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices but not for norms, over the trainable parameters."""
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
    """Batches, losses and evaluations of all runs."""

    def __init__(self, runs: Sequence[Run], target: Target, corpus: Corpus, settings: Settings, notes: dict[str, Any]) -> None:
        self.runs, self.target, self.corpus, self.settings, self.notes = runs, target, corpus, settings, notes
        self.began = time.monotonic()
        self.judged: int | None = None
        """The step that was evaluated last."""
        self._taps = sorted({tap for run in runs for tap in run.objective.taps})
        self._team = runs[0].team
        self._store = None if settings.store is None else self._opened(settings.store)
        self._known = {id(document) for document in (*corpus.train, *corpus.held_out)} if self._store else set[int]()

    def _opened(self, store: str) -> FeatureStore | ShardedStore:
        """Open the store of states. A URL has shards that all processes read; a folder has a part for each process."""
        rank = self._team.rank
        if "://" in store:
            return ShardedStore(store, self.target, self._taps, rank=rank)
        return FeatureStore(Path(store) / str(rank), self.target, self._taps)

    def save(self, out: Path, step: int) -> None:
        """Save everything that resumes a killed run."""
        if self._store is not None:
            self._store.flush()
        save_state(out, self.runs, step, time.monotonic() - self.began, asdict(self.settings))

    def share(self, step: int) -> float:
        """Completed share of the run."""
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
        held, found, self.judged = self.corpus.held_out, dict[str, list[BatchOutcome]](), step
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
                    say(f"step {step}: {run.objective.name} {run.objective.verdict(length)} {run.history[-1]['by_depth']}")

    def _outcomes(self, documents: Sequence[Document]) -> Iterator[tuple[Run, BatchOutcome]]:
        """Every live run's outcome on the same documents, one after the other, so that only one is in memory."""
        last, device = self.target.num_layers, self.target.device
        rows = DocumentRows(self._states(documents), documents, row_len=self.settings.row_len, last=last)
        for run in self.runs:
            if not run.is_done:
                with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.bf16):
                    outcome = run.call(rows.packed(run.objective.taps))
                yield run, outcome

    def _states(self, documents: Sequence[Document]) -> dict[int, list[torch.Tensor]]:
        """States from the store if all documents belong to the corpus. It identifies texts by their tokens, so it keeps
        none with images."""
        if self._store is not None and all(id(each) in self._known and each.seen is None for each in documents):
            return self._store.states(documents)
        return compute(self.target, documents, self._taps)
