"""Online speculative decoding: the draft model learns from what it serves.

From the texts of requests that ended the draft is brought closer to the target's law (Liu et al. 2023, "Online Speculative
Decoding", arXiv 2310.07177, who learn at the rejected places only; that is an option here). Every text counts, also one that
was decoded without a draft: a policy stops drafting exactly where the draft is bad, so rejections alone would teach nothing
there. A copy learns. After every few hundred tokens that the draft did not guess, the copy is held against the draft that
serves, on recent requests it never learned from, and takes its place only if more of its guesses would be accepted there.

    loss = mean over the answers' places t of D(p(t), q(t))     p is computed again from the text: nothing is kept but tokens

A stream that changes would make the draft forget what was asked before; ``replay`` mixes in a share of requests from a
uniform sample of all that was ever served (Vitter's algorithm R: the n-th request takes the place of a random one of the
k kept with chance k / n).

Lossless: weights of a drafter may change between rounds under every lossless rule (``engine/exchange.py`` does it for
running requests). The whole contract is ``observe`` and ``maybe_update``; both return at once where the learning is in the
background.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import final

import numpy as np
import torch
from torch import nn

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.core.request import Origin
from outrider.engine.exchange import Learner
from outrider.models.heads import PackedTexts
from outrider.train.data import Document
from outrider.train.distill import CHUNK, DistillObjective, DistillSettings
from outrider.train.draft_lm import DraftLM
from outrider.train.features import Rows, compute
from outrider.train.objective import accepted_length


@dataclass(frozen=True)
class OnlineSettings:
    """How much is learned from how much, and when it is used."""

    update_every: int = 256
    """Tokens between two updates that the draft did not guess: rejected places, and text that was not drafted at all."""
    num_steps: int = 16
    """Steps of an update."""
    batch_size: int = 8
    """Requests per step."""
    memory: int = 256
    """Latest requests that are learned from."""
    held_every: int = 5
    """One request in this many is judged by and never learned from."""
    num_held: int = 16
    """Latest requests that are judged by."""
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    """Steps after a new beginning until the whole learning rate: Adam does not know the gradients' sizes at first."""
    average: float = 0.95
    """What is judged and served is a running mean of the copy's weights, this share of it the mean before. Steps from few
    requests are noise for the most part, and the mean has little of it."""
    loss: str = "forward"
    rejected_only: bool = False
    """Learn only where guesses were rejected. At the learning rates tried this lowered acceptance (docs/decisions/0025)."""
    prompts: bool = True
    """Learn at the prompts' places too, whose laws the target has as well: from answers alone too little is learned to pass
    the gate (docs/train.md)."""
    replay: float = 0.25
    """Share of the requests of a step that is drawn from all that was ever served instead of from the latest."""
    reservoir: int = 1024
    """Size of the sample that stands for all that was ever served."""
    chunk: int = CHUNK
    """Most logits made at a time; more is faster where there is memory."""
    margin: float = 0.0
    """Tokens per pass on the held-out requests by which a new draft must be better."""
    patience: int = 4
    """Updates without a better draft after which the copy begins again from the one that serves."""
    background: bool = False
    """Learn in a thread of its own."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("update_every", "num_steps", "batch_size", "memory", "num_held", "reservoir", "chunk", "patience"):
            if vars(self)[name] < 1:
                raise OptionError(f"{name} = {vars(self)[name]} is not valid; use a whole number of at least 1")
        if self.held_every < 2:
            raise OptionError(f"held_every = {self.held_every} would leave nothing to learn from; use 2 or more")
        if not self.learning_rate > 0:
            raise OptionError(f"learning_rate = {self.learning_rate} is not valid; use a number above 0")
        if not 0 <= self.average < 1 or self.warmup_steps < 0:
            found = f"average = {self.average}, warmup_steps = {self.warmup_steps}"
            raise OptionError(f"{found} are not valid; use a share of at least 0 and below 1, and no negative number of steps")
        if not 0 <= self.replay < 1:
            raise OptionError(f"replay = {self.replay} is not valid; use a share of at least 0 and below 1")


@dataclass(frozen=True)
class Judgement:
    """One update: tokens per pass on the held-out requests, with the draft that served and with the one that learned."""

    served: float
    learned: float
    swapped: bool


@final
class OnlineDraft(Learner):
    """A draft model that learns from requests."""

    def __init__(
        self, draft: DraftLM, target: Target, settings: OnlineSettings | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        """``draft`` is copied; better ones are served in ``dtype``, the target's if not given. In the background, ``target``
        is used in another thread than the caller's: give a copy where it does not allow that."""
        if draft.config.vocab_size != target.vocab_size:
            sizes = f"{draft.config.vocab_size} tokens and the target {target.vocab_size}"
            raise ModelError(f"the draft knows {sizes}; use a draft of the same vocabulary")
        self.settings = settings or OnlineSettings()
        self.judgements: list[Judgement] = []
        self._target, self._dtype = target, dtype or target.dtype
        self._served = copy.deepcopy(draft).requires_grad_(False)
        self._memory, self._held = deque[Document](maxlen=self.settings.memory), deque[Document](maxlen=self.settings.num_held)
        self._ever = _Sample(self.settings.reservoir, self.settings.seed)
        self._num_seen = self._num_new = self._num_failed = 0
        self._random = np.random.default_rng(self.settings.seed)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="online-draft") if self.settings.background else None
        self._future: Future[Target | None] | None = None
        self._restart()

    @property
    def module(self) -> DraftLM:
        """The draft that serves, as modules: to be saved."""
        return self._served

    def observe(self, prompt_ids: Sequence[int], token_ids: Sequence[int], origins: Sequence[Origin]) -> None:
        tokens, begin = (*prompt_ids, *token_ids), len(prompt_ids)
        rejected = [begin + i for i, origin in enumerate(origins) if origin is Origin.RECOVERED]
        self._num_seen += 1
        if not token_ids or len(tokens) > self._target.max_len:
            return
        if self._num_seen % self.settings.held_every == 0:
            self._held.append(Document(tokens, begin))
        elif rejected or not self.settings.rejected_only:
            first = 0 if self.settings.prompts else begin
            document = Document(tokens, first, tuple(rejected) if self.settings.rejected_only else None)
            self._memory.append(document)
            self._ever.add(document)
            missed = sum(origin is not Origin.ACCEPTED for origin in origins)
            self._num_new += len(rejected) if self.settings.rejected_only else missed

    def maybe_update(self) -> Target | None:
        if self._future is not None:
            if not self._future.done():
                return None
            self._future, done = None, self._future
            return done.result()
        if self._num_new < self.settings.update_every or not self._held:
            return None
        self._num_new = 0
        known = (list(self._memory), list(self._ever.kept), list(self._held))
        if self._pool is None:
            return self._update(*known)
        self._future = self._pool.submit(self._update, *known)
        return None

    def close(self) -> None:
        """End the background thread; what it is learning is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _restart(self) -> None:
        """A new copy to learn."""
        with torch.inference_mode(False):
            self._learner = copy.deepcopy(self._served).requires_grad_(True)
            self._mean, self._num_steps = copy.deepcopy(self._served), 0
            self._optimizer = torch.optim.AdamW(
                self._learner.parameters(), lr=self.settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            )
        self._num_failed = 0

    def _update(self, memory: list[Document], ever: list[Document], held: list[Document]) -> Target | None:
        old = round(self.settings.replay * self.settings.batch_size)
        with torch.inference_mode(False), torch.enable_grad():  # the caller may be in the middle of serving
            for _ in range(self.settings.num_steps):
                self._learn([*self._drawn(ever, old), *self._drawn(memory, self.settings.batch_size - old)])
            batches = [self._packed(part) for part in _parts(held, self.settings.batch_size)]
            served, learned = (self._judge(model, batches) for model in (self._served, self._mean))
            better = learned > served + self.settings.margin
            self.judgements.append(Judgement(served, learned, better))
            if better:
                self._served, self._num_failed = copy.deepcopy(self._mean), 0
                return self._served.served(self._dtype)
            self._num_failed += 1
            if self._num_failed >= self.settings.patience:
                self._restart()
            return None

    def _drawn(self, documents: list[Document], count: int) -> list[Document]:
        chosen = self._random.choice(len(documents), min(count, len(documents)), replace=False)
        return [documents[index] for index in chosen]

    def _learn(self, documents: Sequence[Document]) -> None:
        loss = self._objective(self._learner)(self._packed(documents)).loss
        if not bool(torch.isfinite(loss)):  # the draft that serves is untouched
            self._restart()
            return
        loss.backward()
        nn.utils.clip_grad_norm_(self._learner.parameters(), 1.0)
        self._num_steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, self._num_steps / max(1, self.settings.warmup_steps))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for mean, newest in zip(self._mean.parameters(), self._learner.parameters(), strict=True):
                mean.lerp_(newest, 1 - self.settings.average)

    def _judge(self, model: DraftLM, batches: Sequence[PackedTexts]) -> float:
        with torch.no_grad():
            return accepted_length([self._objective(model)(batch) for batch in batches])

    def _objective(self, model: DraftLM) -> DistillObjective:
        return DistillObjective(
            "online", model, self._target, DistillSettings(loss=self.settings.loss, chunk=self.settings.chunk)
        )

    def _packed(self, documents: Sequence[Document]) -> PackedTexts:
        return Rows(compute(self._target, documents, ()), documents, row_len=1, last=self._target.num_layers).packed(())


@final
class _Sample:
    """A uniform sample of all documents that were added."""

    def __init__(self, size: int, seed: int) -> None:
        self.kept: list[Document] = []
        self._size, self._num_added = size, 0
        self._random = np.random.default_rng([seed, 1])  # the thread that learns has another one

    def add(self, document: Document) -> None:
        self._num_added += 1
        if len(self.kept) < self._size:
            self.kept.append(document)
        elif (place := int(self._random.integers(self._num_added))) < self._size:
            self.kept[place] = document


def _parts(documents: Sequence[Document], size: int) -> list[list[Document]]:
    rest = iter(documents)
    return [part for _ in range(0, len(documents), size) if (part := list(islice(rest, size)))]
