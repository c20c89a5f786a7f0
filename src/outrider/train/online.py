"""Online speculative decoding: a draft model or heads learn from what they serve.

A copy of the draft learns the target's law from the texts of requests that ended (Liu et al. 2023, "Online Speculative
Decoding", arXiv 2310.07177). Every text counts, also one that was decoded without a draft. The paper learns only at rejected
guesses, which is an option here. Under a policy they are too few, because it stops drafting where the draft is bad.

After every few hundred tokens that the draft did not guess, the copy is compared with the draft that serves. The comparison
uses recent requests that the copy never learned from. The copy is served only if more of its guesses would be accepted. What
learns is a ``Pupil`` (``train/pupils.py``). "The draft" means a draft model or heads.

    loss = mean over the answers' positions t of D(p(t), q(t)),     p is computed again from the text

If the kind of requests changes, the draft would forget the earlier kind. So ``replay`` mixes in a share of requests from a
uniform sample of all that were ever served.

Learning has a budget: at most ``busy_share`` of the time while requests are served, and all of the time otherwise
(``train/pace.py``). The target reads each text once, in batches, and its states are kept for the steps that use them again.

Learning is lossless: under every lossless rule, the weights of a drafter may change between rounds
(``engine/replace_drafter.py`` does it for running requests). The interface is ``observe`` and ``maybe_update``. Both return at
once if learning runs in the background.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import nn

from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.core.request import Origin
from outrider.engine.replace_drafter import Learner
from outrider.models.heads.head import Head
from outrider.train.data import Document
from outrider.train.distill import CHUNK
from outrider.train.draft_lm import DraftLM
from outrider.train.objective import accepted_length
from outrider.train.pace import Pace
from outrider.train.pupils import DraftPupil, Exits, HeadPupil, Lesson, Pupil, SortedPupil
from outrider.train.taught_states import TaughtStates
from outrider.train.uniform_sample import UniformSample


@dataclass(frozen=True)
class OnlineSettings:
    """How much is learned from how many requests, and when the result is used."""

    update_every: int = 256
    """Tokens between two updates that the draft did not guess: rejected positions, and text without drafts."""
    num_steps: int = 16
    """Steps of an update."""
    batch_size: int = 8
    """Requests per step."""
    memory: int = 256
    """Number of latest requests to learn from."""
    held_every: int = 5
    """One request in this many is held out for evaluation."""
    num_held: int = 48
    """Number of latest held-out requests."""
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    """Warm-up steps of the learning rate after a restart, because Adam's estimates start empty."""
    average: float = 0.95
    """The copy's weights are averaged over steps, with this share for the previous mean. The mean is evaluated and
    served, because single steps on few requests are noisy."""
    loss: str = "forward"
    rejected_only: bool = False
    """Learn only at rejected guesses. At the learning rates tried this lowered acceptance (docs/decisions/0025)."""
    prompts: bool = True
    """Whether to learn at the prompts' positions too. Answers alone teach too little to pass the evaluation (docs/train.md)."""
    replay: float = 0.25
    """Share of a step's requests that is drawn from everything ever served, instead of from the latest."""
    reservoir: int = 1024
    """Size of the sample of everything ever served."""
    chunk: int = CHUNK
    """Most logits in memory at a time; more is faster if memory suffices."""
    margin: float = 0.0
    """Tokens per pass on the held-out requests by which a new draft must be better."""
    patience: int = 4
    """Updates without a better draft after which the copy restarts from the served one."""
    background: bool = False
    """Learn on a thread of its own."""
    busy_share: float = 0.03
    """Largest share of the time for learning while requests are served. Without requests it takes all."""
    state_bytes: int = 256_000_000
    """Memory for the target's states of the learned texts. What does not fit is computed again."""
    seed: int = 0

    @property
    def lesson(self) -> Lesson:
        """The training settings of a module."""
        return Lesson(self.loss, self.chunk)

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
        if not 0 < self.busy_share <= 1:
            raise OptionError(f"busy_share = {self.busy_share} is not valid; use a share above 0 and up to 1")
        if not 0 <= self.replay < 1:
            raise OptionError(f"replay = {self.replay} is not valid; use a share of at least 0 and below 1")


@dataclass(frozen=True)
class Judgement:
    """One update: tokens per pass on the held-out requests, of the served and of the new draft."""

    served: float
    learned: float
    swapped: bool


@final
class OnlineLearner(Learner):
    """Trains a draft model or heads on served requests."""

    def __init__(self, pupil: Pupil, target: Target, settings: OnlineSettings | None = None) -> None:
        """The pupil's module is copied. In the background, ``target`` runs on another thread than the caller's; pass a
        copy if it does not allow that."""
        self.settings = settings or OnlineSettings()
        self.judgements: list[Judgement] = []
        self.pupil, self._target = pupil, target
        self._states = TaughtStates(target, pupil.taps, self.settings.state_bytes)
        self.pace = Pace(self.settings.busy_share if self.settings.background else 1.0)
        """Time spent on updates, and how much of it beside requests."""
        self._served = copy.deepcopy(pupil.module).requires_grad_(False)
        self._memory, self._held = deque[Document](maxlen=self.settings.memory), deque[Document](maxlen=self.settings.num_held)
        self._ever = UniformSample(self.settings.reservoir, self.settings.seed)
        self._num_seen = self._num_new = self._num_failed = 0
        self._random = np.random.default_rng(self.settings.seed)
        self._pool = _one_thread() if self.settings.background else None
        self._future: Future[Any] | None = None
        self._restart()

    @property
    def module(self) -> nn.Module:
        """The served draft as modules, for saving."""
        return self._served

    @property
    def is_learning(self) -> bool:
        """Whether an update runs, or is done but not fetched by ``maybe_update`` yet."""
        return self._future is not None

    @property
    def _goes_on(self) -> bool:
        """Whether to learn again in idle time. It ends after ``patience`` failed updates."""
        return self._pool is not None and bool(self.judgements) and (self.judgements[-1].swapped or self._num_failed > 0)

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

    def maybe_update(self, *, is_idle: bool = True) -> Any:
        self.pace.tell(is_idle=is_idle)
        if self._future is not None:
            if not self._future.done():
                return None
            self._future, done = None, self._future
            return done.result()
        if not self._held or not (self._num_new >= self.settings.update_every or (is_idle and self._goes_on)):
            return None
        self._num_new = 0
        known = (list(self._memory), list(self._ever.kept), list(self._held))
        if self._pool is None:
            return self._update(*known)
        self._future = self._pool.submit(self._update, *known)
        return None

    def close(self) -> None:
        """End the background thread and drop its work."""
        if self._pool is not None:
            self.pace.end()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _restart(self) -> None:
        """Start again from a copy of the served draft."""
        with torch.inference_mode(False):
            self._learner = self.pupil.learning(copy.deepcopy(self._served))
            self._mean, self._num_steps = copy.deepcopy(self._served), 0
            learned = [parameter for parameter in self._learner.parameters() if parameter.requires_grad]
            self._optimizer = torch.optim.AdamW(learned, lr=self.settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._num_failed = 0

    def _update(self, memory: list[Document], ever: list[Document], held: list[Document]) -> Any:
        old = round(self.settings.replay * self.settings.batch_size)
        with torch.inference_mode(False), torch.enable_grad(), self.pace.working():  # the caller may be in the midst of serving
            for _ in range(self.settings.num_steps):
                self._learn([*self._drawn(ever, old), *self._drawn(memory, self.settings.batch_size - old)])
            return self._gate(held)

    def _gate(self, held: Sequence[Document]) -> Any:
        """The new draft, if more of its guesses would be accepted in the held-out requests; otherwise None."""
        served, learned = (self._judge(model, held) for model in (self._served, self._mean))
        better = learned > served + self.settings.margin
        self.judgements.append(Judgement(served, learned, better))
        self._num_failed = 0 if better else self._num_failed + 1
        if better:
            self._served = copy.deepcopy(self._mean)
        elif self._num_failed >= self.settings.patience:
            self._restart()
        return self.pupil.served(self._served) if better else None

    def _drawn(self, documents: list[Document], count: int) -> list[Document]:
        chosen = self._random.choice(len(documents), min(count, len(documents)), replace=False)
        return [documents[index] for index in chosen]

    def _learn(self, documents: Sequence[Document]) -> None:
        loss = self.pupil.objective(self._learner)(self._states.packed(documents)).loss
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

    def _judge(self, model: nn.Module, held: Sequence[Document]) -> float:
        objective, size = self.pupil.objective(model), self.settings.batch_size
        with torch.no_grad():
            parts = [held[begin : begin + size] for begin in range(0, len(held), size)]
            return accepted_length([objective(self._states.packed(part)) for part in parts])


def online_draft(
    draft: DraftLM, target: Target, settings: OnlineSettings | None = None, *, dtype: torch.dtype | None = None
) -> OnlineLearner:
    """A learning draft model. Better ones are served in ``dtype``, by default the target's."""
    settings = settings or OnlineSettings()
    return OnlineLearner(DraftPupil(draft, target, settings.lesson, dtype or target.dtype), target, settings)


def online_sorted_draft(
    draft: DraftLM, target: Target, settings: OnlineSettings | None = None, *, dtype: torch.dtype, exits: Exits
) -> OnlineLearner:
    """A learning draft model with nested exits, all of which learn."""
    settings = settings or OnlineSettings()
    return OnlineLearner(SortedPupil(draft, target, settings.lesson, dtype, exits=exits), target, settings)


def online_heads(
    head: Head, target: Target, settings: OnlineSettings | None = None, *, dtype: torch.dtype | None = None
) -> OnlineLearner:
    """Learning heads, with the objective of ``outrider train`` for their kind. Better ones are served in ``dtype``, by
    default that of ``head``."""
    settings = settings or OnlineSettings()
    return OnlineLearner(HeadPupil(head, target, settings.lesson, dtype), target, settings)


def _one_thread() -> ThreadPoolExecutor:
    """The learning thread. It uses one core and leaves the others to serving."""
    return ThreadPoolExecutor(1, thread_name_prefix="online-draft", initializer=torch.set_num_threads, initargs=(1,))
