"""Distilling draft models: DistillSpec and AdaSPEC.

DistillSpec (Zhou et al. 2023, arXiv 2310.08461) brings the draft's law to the target's, place by place, by a divergence of
choice, on given text (off-policy) or on text the draft itself writes (on-policy), which is where it will be asked. AdaSPEC
(Hu et al. 2025) spends a small draft's capacity on what it can learn: of every batch only the places count whose loss
exceeds a distilled reference model's most.

    distill   mean_t D(p(t), q(t))
    adaspec   mean over the share k of places with the largest  D(p, q) - D(p, q_reference)          (k = 0.4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.acceptance import Coupled
from outrider.core.draft import Draws
from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.drafters.null import NullDrafter
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.models.heads import Packed
from outrider.policies.fixed import Fixed, FixedOptions
from outrider.train.data import Document
from outrider.train.divergence import divergence
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import Objective, Outcome

DISTILL_KINDS = ("distill", "adaspec")
_CHUNK = 1 << 24


@dataclass(frozen=True)
class DistillSettings:
    """What a draft model learns from."""

    loss: str = "forward"
    on_policy: float = 0.0
    """Share of the documents that the draft continues itself before they are learned from."""
    kept: float = 0.4
    """AdaSPEC: share of the places that count."""
    num_depths: int = 4
    """Length of the chains it is judged by."""

    def __post_init__(self) -> None:
        divergence(self.loss)
        if not 0 <= self.on_policy <= 1 or not 0 < self.kept <= 1 or self.num_depths < 1:
            raise OptionError(
                f"on_policy = {self.on_policy}, kept = {self.kept}, num_depths = {self.num_depths} are not valid; use shares "
                "from 0 to 1 (kept above 0) and at least one depth"
            )


def new_distillation(
    kind: str, target: Target, *, draft: str | None, reference: str | None, settings: DistillSettings
) -> DistillObjective:
    """The objective of a draft model, by folder names."""
    if draft is None:
        raise OptionError(f"training {kind!r} begins with a draft model; give --draft")
    if (kind == "adaspec") != (reference is not None):
        raise OptionError("adaspec, and only it, compares with a distilled model; give --reference to it alone")
    student = DraftLM.load(draft, target.device)
    teacher = None if reference is None else DraftLM.load(reference, target.device).requires_grad_(False)
    if student.config.vocab_size != target.vocab_size:
        sizes = f"{student.config.vocab_size} tokens and the target {target.vocab_size}"
        raise ModelError(f"{draft} has {sizes}; use a draft of the same vocabulary")
    return DistillObjective(kind, student, target, settings, reference=teacher)


@final
class DistillObjective(Objective):
    """A draft model against the target's laws."""

    taps = ()

    def __init__(
        self, name: str, draft: DraftLM, target: Target, settings: DistillSettings, *, reference: DraftLM | None = None
    ) -> None:
        self.name, self.module, self.draft, self.target = name, draft, draft, target
        self.settings, self.reference = settings, reference
        self._loss = divergence(settings.loss)

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        """The draft continues some of them itself, at temperature 1."""
        count = round(len(documents) * self.settings.on_policy)
        if not count:
            return documents
        model = self.draft.frozen()
        method = Method(NullDrafter(draws=Draws.DETERMINISTIC), Coupled(), Fixed(FixedOptions()))
        requests = []
        for index, document in enumerate(documents[:count]):
            prompt = document.tokens[: document.begin or max(1, len(document.tokens) // 4)]
            params = SamplingParams(
                max_tokens=max(1, len(document.tokens) - len(prompt)), temperature=1.0, seed=step * 100_003 + index
            )
            requests.append(Request(list(prompt), params))
        written: dict[int, Document] = {}
        for done in run(Engine(model, method), requests, max_batch_size=count):
            if done.state.is_finished:
                written[done.request] = Document(tuple(done.state.tokens), len(requests[done.request].prompt_ids))
        return [*(written[index] for index in range(count)), *documents[count:]]

    def __call__(self, batch: Packed) -> Outcome:
        valid = batch.valid(0)
        losses, hits = self._places(batch, self.draft)
        if self.reference is not None and self.module.training:
            with torch.no_grad():
                known, _ = self._places(batch, self.reference)
            chosen = self._learnable(losses.detach() - known, valid)
        else:
            chosen = valid
        loss = (losses * chosen).sum() / chosen.sum().clamp(min=1)
        depths = range(self.settings.num_depths)
        return Outcome(
            loss, [batch.shifted(hits & valid, k) for k in depths], [batch.valid(k) & batch.shifted(valid, k) for k in depths]
        )

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.draft.save(folder, notes)

    def _learnable(self, gain: Tensor, valid: Tensor) -> Tensor:
        """The places whose loss exceeds the reference's most."""
        count = max(1, int(self.settings.kept * int(valid.sum())))
        least = gain.masked_fill(~valid, -torch.inf).flatten().topk(count).values[-1]
        return valid & (gain >= least)

    def _places(self, batch: Packed, model: DraftLM) -> tuple[Tensor, Tensor]:
        """[R, L] divergence, and where the likeliest tokens agree; logits exist for a few places at a time."""
        states, last = model(batch).flatten(0, 1), batch.last.flatten(0, 1)
        size, pieces = max(1, _CHUNK // self.target.vocab_size), list[tuple[Tensor, Tensor]]()
        for begin in range(0, len(states), size):
            part = states[begin : begin + size], last[begin : begin + size], model
            pieces.append(cast("tuple[Tensor, Tensor]", checkpoint(self._chunk, *part, use_reentrant=False)))
        shape = batch.tokens.shape
        return torch.cat([loss for loss, _ in pieces]).view(shape), torch.cat([hit for _, hit in pieces]).view(shape)

    def _chunk(self, states: Tensor, last: Tensor, model: DraftLM) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.target.logits(last).float()
        logits = model.logits(states).float()
        return self._loss(teacher.log_softmax(-1), logits.log_softmax(-1)), logits.argmax(-1) == teacher.argmax(-1)
