"""Training objectives: the interface between a method and the one training loop, and the objective of all heads.

    loss = sum_k decay^k mean_t D(p(t + 1 + k), q_k(t))  [ + weight * mean_t SmoothL1(state_k(t), feature(t + 1 + k))  for
    EAGLE-1,  + weight * mean_t BCE(c_k(t), 1 - TV(p(t + 1 + k), q_k(t)))  for heads with a confidence head ]

p is the target's law. It is computed from the target's last state, for a few thousand positions at a time, and dropped, like q.
Both are computed again in the backward pass. So the memory for logits does not grow with the number of heads or positions. A
place is a *hit* at depth k if the likeliest tokens agree. The accepted length is 1 + the mean number of hits before the first
miss, as greedy decoding of a chain would get.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outrider.core.errors import OptionError
from outrider.models.heads import Head, PackedTexts, save_head
from outrider.models.heads.head import FeatureHead
from outrider.train.data import Document
from outrider.train.divergence import divergence

_CHUNK = 1 << 24
"""Most logits in memory at a time, by default."""


@dataclass(frozen=True, eq=False)
class BatchOutcome:
    """The result of one batch."""

    loss: Tensor
    hits: list[Tensor]
    """[R, L] per depth: whether the likeliest tokens agree."""
    valid: list[Tensor]
    """[R, L] per depth: whether there is a token to compare with."""

    def accepted(self) -> tuple[Tensor, Tensor]:
        """Sum over positions of the hits before the first miss, and the number of positions that have all depths."""
        whole = torch.stack(self.valid).all(0)
        runs = torch.stack(self.hits).int().cumprod(0).sum(0)
        return (runs * whole).sum(), whole.sum()

    def rates(self) -> Tensor:
        """[K, 2] by depth: hits after only hits, and the number of such positions."""
        alive, found = torch.ones_like(self.hits[0]), list[Tensor]()
        for hit, valid in zip(self.hits, self.valid, strict=True):
            asked = alive & valid
            alive = asked & hit
            found.append(torch.stack([alive.sum(), asked.sum()]))
        return torch.stack(found)


class Teacher(Protocol):
    """The target whose laws are learned."""

    @property
    def device(self) -> torch.device: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Objective(ABC):
    """A method's part of the training loop."""

    name: str
    module: nn.Module
    taps: tuple[int, ...]
    """Target layers it reads."""

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        """The documents of a step: the given ones, unless the method generates some itself."""
        del step
        return documents

    @abstractmethod
    def __call__(self, batch: PackedTexts) -> BatchOutcome: ...

    @abstractmethod
    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write the result with its provenance."""

    def verdict(self, length: float) -> str:
        """Explains the "accepted length" by which checkpoints of this objective are evaluated."""
        return f"{length:.2f} tokens per pass (chain, held out), acceptance by position"


@dataclass(frozen=True)
class HeadSettings:
    """Settings for training heads."""

    num_depths: int = 4
    """Number of trained depths: EAGLE's training-time test. For other heads at most their number."""
    decay: float = 0.8
    """Weight of each depth relative to the one before."""
    loss: str = "forward"
    feature_weight: float = 0.0
    """Weight of the distance to the target's next features (EAGLE-1)."""
    confidence_weight: float = 0.0
    """Weight of the cross-entropy between the heads' confidence and the acceptance probability of a sampled guess (DSpark)."""
    noise: float = 0.0
    """Uniform noise added to features, as a share of their size."""
    glance: float = 0.0
    """Share of the wrong guesses whose following tokens are revealed (Falcon)."""
    glance_steps: int = 1000
    """Steps in which that share falls to 0."""
    curriculum_steps: int = 0
    """Steps in which images are introduced: none in the first half, more and more in the second, only images after it
    (MSD). 0 uses all documents from the start."""

    def __post_init__(self) -> None:
        divergence(self.loss)
        if self.num_depths < 1 or not 0 < self.decay <= 1:
            found = f"num_depths = {self.num_depths}, decay = {self.decay}"
            raise OptionError(f"{found} are not valid; use at least one depth and a decay above 0 and up to 1")
        if not 0 <= self.glance <= 1 or self.glance_steps < 1:
            found = f"glance = {self.glance}, glance_steps = {self.glance_steps}"
            raise OptionError(f"{found} are not valid; use a share from 0 to 1 and at least one step")


@final
class HeadObjective(Objective):
    """Trains heads on the target's laws."""

    def __init__(
        self,
        head: Head,
        target: Teacher,
        settings: HeadSettings | None = None,
        *,
        compiled: bool = False,
        chunk: int = _CHUNK,
        recompute: bool = True,
    ) -> None:
        """The objective of ``head``.

        ``compiled`` compiles the loss, for a GPU. ``chunk`` is the number of logits in memory at a time. Without
        ``recompute`` logits are kept for the backward pass, which is faster if memory suffices.
        """
        self.name, self.module, self.taps = head.config.kind, head, head.config.taps
        self.head, self.target, self.settings = head, target, settings or HeadSettings()
        self._recompute, self._glance = recompute, self.settings.glance
        self._chunk_len = max(1, chunk // head.config.vocab_size)
        whole = head.config.draft_vocab_size == head.config.vocab_size
        self._ids = None if whole else head.target_ids.to(target.device)
        self._compare: Callable[..., tuple[Tensor, Tensor]] = comparison(divergence(self.settings.loss))
        if compiled:
            self._compare = torch.compile(self._compare, dynamic=False)

    def __call__(self, batch: PackedTexts) -> BatchOutcome:
        settings, total = self.settings, batch.last.new_zeros((), dtype=torch.float32)
        hits, valids = list[Tensor](), list[Tensor]()
        for depth, states in enumerate(self.head.depths(self._glanced(self._noisy(batch)), settings.num_depths)):
            valid = batch.valid(depth + 1)
            loss, hit = self._depth(batch, depth, states, valid)
            if settings.feature_weight:
                loss = loss + settings.feature_weight * self._distance(batch, depth, states, valid)
            total = total + settings.decay**depth * loss
            hits.append(hit & valid)
            valids.append(valid)
        return BatchOutcome(total, hits, valids)

    def write(self, documents: Sequence[Document], step: int) -> Sequence[Document]:
        """The documents of a step that the curriculum allows. The step's number also sets the share of revealed tokens."""
        self._glance = self.settings.glance * max(0.0, 1 - step / self.settings.glance_steps)
        steps = self.settings.curriculum_steps
        return images_later(documents, step / steps) if steps else documents

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        save_head(self.head, folder, notes=notes)

    def _glanced(self, batch: PackedTexts) -> PackedTexts:
        return self.head.glance(batch, self._glance) if self._glance and self.module.training else batch

    def _noisy(self, batch: PackedTexts) -> PackedTexts:
        if not self.settings.noise or not self.module.training:
            return batch
        size = batch.features.float().pow(2).mean(-1, keepdim=True).sqrt().to(batch.features.dtype)
        moved = batch.features + (torch.rand_like(batch.features) * 2 - 1) * self.settings.noise * size
        return PackedTexts(batch.tokens, moved, batch.last, batch.segments, batch.positions, batch.supervised)

    def _depth(self, batch: PackedTexts, depth: int, states: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Mean divergence over valid positions, and the hits."""
        last = batch.shifted(batch.last, depth + 1)
        return in_chunks(partial(self._chunk, depth), states, last, valid, size=self._chunk_len, recompute=self._recompute)

    def _chunk(self, depth: int, states: Tensor, last: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.target.logits(last)
        logits = self.head.readout(depth, states)
        loss, hits = self._compare(logits, teacher, mask, self._ids)
        if self.settings.confidence_weight:
            chance = acceptance_chance(logits.detach(), teacher, self._ids)
            given = F.binary_cross_entropy_with_logits(self.head.confidence(states).float(), chance, reduction="none")
            loss = loss + self.settings.confidence_weight * (given * mask).sum()
        return loss, hits

    def _distance(self, batch: PackedTexts, depth: int, states: Tensor, valid: Tensor) -> Tensor:
        """Distance to the target's features at the predicted positions."""
        assert isinstance(self.head, FeatureHead), "only EAGLE's and Falcon's states are features"
        with torch.no_grad():
            wanted = self.head.fuse(batch.shifted(batch.features, depth + 1))
        distance = F.smooth_l1_loss(self.head.aligned(states).float(), wanted.float(), reduction="none").mean(-1)
        return (distance * valid).sum() / valid.sum().clamp(min=1)


def images_later(documents: Sequence[Document], done: float) -> Sequence[Document]:
    """The part of a batch to learn after a share ``done`` of a curriculum: texts first, images last. A batch of one kind
    is unchanged."""
    share = min(max(2 * done - 1, 0.0), 1.0)
    texts = [document for document in documents if document.seen is None]
    images = [document for document in documents if document.seen is not None]
    if not texts or not images:
        return documents
    return [*texts[: math.ceil((1 - share) * len(texts))], *images[: math.ceil(share * len(images))]]


def in_chunks(
    compare: Callable[..., tuple[Tensor, Tensor]], states: Tensor, last: Tensor, valid: Tensor, *, size: int, recompute: bool
) -> tuple[Tensor, Tensor]:
    """Mean loss over valid positions, and [R, L] hits, of ``compare(states, last, mask)``.

    It compares ``size`` positions at a time, and with ``recompute`` again in the backward pass.
    """
    flat, other, mask = states.flatten(0, 1), last.flatten(0, 1), valid.flatten()
    total, hits = states.new_zeros((), dtype=torch.float32), list[Tensor]()
    for begin in range(0, len(flat), size):
        part = slice(begin, begin + size)
        pieces = (flat[part], other[part], mask[part])
        found = checkpoint(compare, *pieces, use_reentrant=False) if recompute else compare(*pieces)
        loss, hit = cast("tuple[Tensor, Tensor]", found)
        total = total + loss
        hits.append(hit)
    return total / mask.sum().clamp(min=1), torch.cat(hits).view_as(valid)


def comparison(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def compare(logits: Tensor, teacher: Tensor, mask: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum of the losses at positions of the mask, and top-1 agreement. Positions whose likeliest token the draft
        lacks are left out."""
        teacher, logits = teacher.float(), logits.float()
        best = teacher.argmax(-1)
        if ids is not None:
            teacher = teacher[..., ids]
            best = torch.where(ids[teacher.argmax(-1)] == best, teacher.argmax(-1), -1)
        losses = loss_of(teacher.log_softmax(-1), logits.log_softmax(-1))
        return (losses * (mask & (best >= 0))).sum(), logits.argmax(-1) == best

    return compare


def acceptance_chance(logits: Tensor, teacher: Tensor, ids: Tensor | None) -> Tensor:
    """[...] 1 - TV(p, q): the acceptance probability of a guess sampled from the draft, under rejection sampling."""
    p = teacher.float().softmax(-1)
    p = p if ids is None else p[..., ids]
    return torch.minimum(p, logits.float().softmax(-1)).sum(-1).clamp(max=1)


def accepted_length(outcomes: Sequence[BatchOutcome]) -> float:
    """Tokens per pass of a chain of all depths, including the target's own token."""
    sums = [outcome.accepted() for outcome in outcomes]
    runs, places = sum(int(s) for s, _ in sums), sum(int(n) for _, n in sums)
    return 1 + runs / max(1, places)
