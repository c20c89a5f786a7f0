"""Distilling draft models: DistillSpec and AdaSPEC.

DistillSpec (Zhou et al. 2023, arXiv 2310.08461) minimises a divergence between the draft's law and the target's at every
position. The text is given (off-policy) or written by the draft itself (on-policy). AdaSPEC (Hu et al. 2025) spends a small
draft's capacity on what it can learn. Of every batch it keeps the positions whose loss most exceeds that of a distilled
reference model.

    distill   mean_t D(p(t), q(t))
    adaspec   mean over the share k of places with the largest  D(p, q) - D(p, q_reference)          (k = 0.4)
    pretrain  mean_t -log q(x_{t+1}):  the text itself; on text the target wrote, FastDraft's alignment (Zafrir et al. 2024,
              arXiv 2411.11055)
    kangaroo  distill, of an adapter behind an early exit (models/adapter.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from outrider.drafters.plain import NullDrafter
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.models.adapter import new_adapter
from outrider.models.heads import PackedTexts
from outrider.models.heads.embedding_and_output import read_target
from outrider.models.taught_model import Student
from outrider.policies.fixed import Fixed, FixedOptions
from outrider.train.data import Document
from outrider.train.devices import current_team
from outrider.train.divergence import divergence
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import BatchOutcome, Objective

TEXT = "text"
"""Loss on the tokens of the text, instead of the target's law."""
CHUNK = 1 << 24


@dataclass(frozen=True)
class DistillSettings:
    """Settings for training a draft model."""

    loss: str = "forward"
    on_policy: float = 0.0
    """Share of the documents that the draft continues itself before they are learned."""
    kept: float = 0.4
    """AdaSPEC: share of the positions that are learned."""
    num_depths: int = 4
    """Length of the chains by which checkpoints are evaluated."""
    chunk: int = CHUNK
    """Most logits in memory at a time."""
    recompute: bool = True
    """Recompute logits in the backward pass. False is faster if memory suffices."""
    compiled: bool = False
    """Compile the loss, for a GPU."""

    def __post_init__(self) -> None:
        if self.loss != TEXT:
            divergence(self.loss)
        if not 0 <= self.on_policy <= 1 or not 0 < self.kept <= 1 or self.num_depths < 1:
            raise OptionError(
                f"on_policy = {self.on_policy}, kept = {self.kept}, num_depths = {self.num_depths} are not valid; use shares "
                "from 0 to 1 (kept above 0) and at least one depth"
            )


def new_distillation(
    kind: str, target: Target, *, draft: str | None, reference: str | None, settings: DistillSettings
) -> DistillObjective:
    """The objective of a draft model, from folder names."""
    if draft is None:
        raise OptionError(f"training {kind!r} needs a draft model to start from; give --draft")
    if (kind == "adaspec") != (reference is not None):
        raise OptionError(
            "only adaspec uses a distilled reference model, and it needs one; give --reference with adaspec alone"
        )
    student = DraftLM.load(draft, target.device)
    teacher = None if reference is None else DraftLM.load(reference, target.device).requires_grad_(False)
    return distillation(kind, student, target, settings, reference=teacher)


def distillation(
    kind: str, student: DraftLM, target: Target, settings: DistillSettings, *, reference: DraftLM | None = None
) -> DistillObjective:
    """The objective of a loaded draft model."""
    if student.config.vocab_size != target.vocab_size:
        sizes = f"{student.config.vocab_size} tokens and the target {target.vocab_size}"
        raise ModelError(f"{student.origin} has {sizes}; use a draft of the same vocabulary")
    if kind == "pretrain":
        settings = replace(settings, loss=TEXT)
    return DistillObjective(kind, student, target, settings, reference=reference)


def new_kangaroo(name: str, target: Target, settings: DistillSettings, *, exit_layer: int | None) -> DistillObjective:
    """The objective of an adapter behind an exit of the target called ``name``."""
    raw, ends = read_target(name)
    layer = max(1, target.num_layers // 2) if exit_layer is None else exit_layer
    adapter = new_adapter(raw, ends, target, exit_layer=layer)
    return DistillObjective("kangaroo", adapter, target, replace(settings, on_policy=0.0))


@final
class DistillObjective(Objective):
    """Trains a draft on the target's laws."""

    def __init__(
        self, name: str, student: Student, target: Target, settings: DistillSettings, *, reference: Student | None = None
    ) -> None:
        self.name, self.module, self.student, self.target = name, student, student, target
        self.settings, self.reference, self.taps = settings, reference, student.taps
        self._compare = text_loss if settings.loss == TEXT else law_loss(settings.loss)
        if settings.compiled:
            self._compare = torch.compile(self._compare, dynamic=True)

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        """The documents, some of them continued by the draft itself at temperature 1."""
        count = round(len(documents) * self.settings.on_policy)
        if not count:
            return documents
        assert isinstance(self.student, DraftLM), "only a model writes"
        if current_team().size > 1:
            raise OptionError("on_policy text cannot be written by several processes; use one, or regenerate the text first")
        model = self.student.frozen()
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
                prompt_len, seen = len(requests[done.request].prompt_ids), documents[done.request].seen
                written[done.request] = Document(tuple(done.state.tokens), prompt_len, seen=seen)
        return [*(written[index] for index in range(count)), *documents[count:]]

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        valid = batch.valid(0)
        losses, hits = self.places(batch, self.student(batch), self.student)
        if self.reference is not None and self.module.training:
            with torch.no_grad():
                known, _ = self.places(batch, self.reference(batch), self.reference)
            chosen = self._learnable(losses.detach() - known, valid)
        else:
            chosen = valid
        loss = (losses * chosen).sum() / chosen.sum().clamp(min=1)
        return chain_outcome(batch, loss, hits, self.settings.num_depths)

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        self.student.save(folder, notes)

    def _learnable(self, gain: Tensor, valid: Tensor) -> Tensor:
        """The positions whose loss exceeds the reference's most."""
        count = max(1, int(self.settings.kept * int(valid.sum())))
        least = gain.masked_fill(~valid, -torch.inf).flatten().topk(count).values[-1]
        return valid & (gain >= least)

    def places(self, batch: PackedTexts, states: Tensor, model: Student) -> tuple[Tensor, Tensor]:
        """[R, L] divergence and top-1 agreement at the learned positions. Logits are computed for a few positions at a
        time."""
        counted = batch.valid(0).flatten().nonzero()[:, 0]
        flat = (part.flatten(0, 1)[counted] for part in (states, batch.last, batch.shifted(batch.tokens, 1)))
        size = max(1, self.settings.chunk // self.target.vocab_size)
        again = self.settings.recompute and len(counted) > size  # of a single piece it would save nothing
        pieces = list[tuple[Tensor, Tensor]]()
        for own, last, next_tokens in zip(*(tensor.split(size) for tensor in flat), strict=True):
            given = (own, last, next_tokens, model)
            found = checkpoint(self._chunk, *given, use_reentrant=False) if again else self._chunk(*given)
            pieces.append(cast("tuple[Tensor, Tensor]", found))
        losses, hits = (torch.cat(found) for found in zip(*pieces, strict=True))
        shape, places = batch.tokens.shape, batch.tokens.numel()
        all_losses, all_hits = losses.new_zeros(places), hits.new_zeros(places)
        return all_losses.index_put((counted,), losses).view(shape), all_hits.index_put((counted,), hits).view(shape)

    def _chunk(self, states: Tensor, last: Tensor, following: Tensor, model: Student) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.target.logits(last)
        return self._compare(model.logits(states), teacher, following)


Comparison = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def law_loss(name: str) -> Comparison:
    """A function for divergence and top-1 agreement [N] of logits [N, V] with the target's logits and the next tokens [N]."""
    distance = divergence(name)

    def compare(logits: Tensor, teacher: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        del following
        loss = distance(teacher.float().log_softmax(-1), logits.float().log_softmax(-1))
        return loss, logits.argmax(-1) == teacher.argmax(-1)

    return compare


def text_loss(logits: Tensor, teacher: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and top-1 agreement [N] of logits [N, V] with the next tokens [N]."""
    log_q = logits.float().log_softmax(-1)
    return -log_q.gather(-1, following[:, None])[:, 0], logits.argmax(-1) == teacher.argmax(-1)


def chain_outcome(batch: PackedTexts, loss: Tensor, hits: Tensor, num_depths: int) -> BatchOutcome:
    """Outcome of a drafter that guesses the next token at every position [R, L]. A chain runs from position to position."""
    valid, depths = batch.valid(0), range(num_depths)
    return BatchOutcome(
        loss, [batch.shifted(hits & valid, k) for k in depths], [batch.valid(k) & batch.shifted(valid, k) for k in depths]
    )
