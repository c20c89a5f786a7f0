"""Speculative decoding of continuous tokens (CSpD), round by round, for a batch of images that each keep their own pace.

    plan -> propose -> score -> walk -> commit

``PathEngine.step`` does this, as ``Engine.step`` does for ids. It is a separate loop: here a token is a vector and a law is a
denoiser, but the engine's trees, laws and requests hold ids and logits (record 0088).

The target may write the first tokens alone (``prefill``), where the paper found the draft worst.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from outrider.core.errors import OptionError, RequestError
from outrider.core.interfaces import Cache
from outrider.core.plan import Plan
from outrider.core.request import Origin, Stats
from outrider.images.continuous.drafting import NoGuesses, PathDraftModel
from outrider.images.continuous.interfaces import ContinuousTarget, PathContext, PathDraft, PathDrafter, PathLaw, PathVerdict
from outrider.images.continuous.paths import denoised, fresh_noise
from outrider.images.continuous.rules import JointPath, PathRule


@final
@dataclass(frozen=True)
class ContinuousSettings:
    """How much is drafted."""

    window: int = 4
    """g: drafted tokens of a round."""
    prefill: float = 0.0
    """Share of the image's tokens that the target writes before drafting begins."""

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 <= self.prefill <= 1:
            values = f"window = {self.window}, prefill = {self.prefill}"
            raise OptionError(f"{values} is not valid; use a window from 1 on and a share from 0 to 1")

    def plan(self, written: Sequence[int], num_tokens: int) -> Plan:
        """The next chains of rows that have these many tokens, cut to the room left (one token is always free)."""
        alone = round(self.prefill * num_tokens)
        depth = tuple(self.window if count >= alone else 0 for count in written)
        return Plan(depth, depth).clipped([num_tokens - count - 1 for count in written])


@dataclass(eq=False)
class ImageState:
    """One image: its progress and its cost."""

    label: int
    origins: list[Origin] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    """The pass that each token came from, counted from 0."""
    num_paths: int = 0
    """Target paths that were run one after the other."""
    stats: Stats = field(default_factory=Stats)


@dataclass(eq=False)
class PathBatch:
    """Images that share target passes, with all state that changes."""

    rows: list[ImageState]
    labels: Tensor
    tokens: Tensor
    """[B, L + 1, D] the class's entry, then tokens."""
    cache: Cache
    drafter_state: Cache | None
    chance: torch.Generator

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row, the class included. The cache holds all but the last."""
        return [1 + len(row.rounds) for row in self.rows]

    def narrow(self, kept: Sequence[int]) -> PathBatch:
        """The named rows. This batch is not used again."""
        state = None if self.drafter_state is None else self.drafter_state.narrow(kept)
        index, rows = torch.tensor(list(kept), dtype=torch.int64), [self.rows[row] for row in kept]
        return PathBatch(rows, self.labels[index], self.tokens[index], self.cache.narrow(kept), state, self.chance)


class PathRound(NamedTuple):
    """The result of a round."""

    draft: PathDraft
    verdict: PathVerdict
    draft_seconds: float
    score_seconds: float


@final
class PathEngine:
    """A target, a drafter and a rule. It has no state between calls: everything that changes is in the ``PathBatch``."""

    def __init__(self, target: ContinuousTarget, drafter: PathDrafter, rule: PathRule, settings: ContinuousSettings) -> None:
        self.target, self.drafter, self.rule, self.settings = target, drafter, rule, settings

    def start(self, labels: Tensor, chance: torch.Generator) -> PathBatch:
        """Images without tokens: the class is the root of the first chain."""
        target, count = self.target, len(labels)
        bad = next((label for label in labels.tolist() if not 0 <= label < target.num_classes), None)
        if bad is not None:
            raise RequestError(f"class {bad} does not exist in this model; use 0 to {target.num_classes - 1}")
        tokens = torch.zeros(count, target.num_tokens + 1, target.dim, dtype=target.dtype)
        rows = [ImageState(label) for label in labels.tolist()]
        return PathBatch(rows, labels, tokens, target.new_cache(count), self.drafter.start(count), chance)

    @torch.no_grad()
    def step(self, batch: PathBatch) -> PathRound:
        """Run one round. No row may be finished."""
        began = time.perf_counter()
        plan = self.settings.plan([len(row.rounds) for row in batch.rows], self.target.num_tokens)
        context = PathContext(batch.tokens, batch.lengths, batch.labels, batch.chance)
        draft = self.drafter.asked(batch.drafter_state, context, plan)
        drafted = time.perf_counter()
        law = PathLaw(self.target, self.target.score(draft.nodes, batch.labels, batch.cache))
        scored = time.perf_counter()
        verdict = self.rule.walk(draft, law, batch.chance)
        batch.cache.commit([range(count + 1) for count in verdict.num_accepted.tolist()])
        _emit(batch, draft, verdict)
        self.drafter.observe(batch.drafter_state, batch.lengths)
        done = PathRound(draft, verdict, drafted - began, scored - drafted)
        _count(batch, done, time.perf_counter() - began)
        return done


def _emit(batch: PathBatch, draft: PathDraft, verdict: PathVerdict) -> None:
    """Append each row's accepted guesses, and the token after them."""
    rejected = verdict.rejected.tolist()
    for b, (row, count) in enumerate(zip(batch.rows, verdict.num_accepted.tolist(), strict=True)):
        begin = 1 + len(row.rounds)
        batch.tokens[b, begin : begin + count] = draft.nodes[b, 1 : count + 1]
        batch.tokens[b, begin + count] = verdict.next_token[b]
        row.origins += [Origin.ACCEPTED] * count + [Origin.RECOVERED if rejected[b] else Origin.BONUS]
        row.rounds += [row.stats.num_passes] * (count + 1)


def _count(batch: PathBatch, done: PathRound, seconds: float) -> None:
    """Add a round to the statistics of its rows."""
    verdict = done.verdict
    found = (verdict.num_accepted.tolist(), verdict.rejected.tolist(), verdict.num_paths.tolist(), done.draft.depth)
    for row, accepted, rejected, paths, depth in zip(batch.rows, *found, strict=True):
        row.num_paths += paths
        stats = row.stats
        stats.num_passes += 1
        stats.num_drafted += depth
        stats.num_accepted += accepted
        stats.num_tested += accepted + rejected
        stats.num_tokens += accepted + 1
        stats.draft_seconds += done.draft_seconds
        stats.score_seconds += done.score_seconds
        stats.seconds += seconds


@final
@dataclass(frozen=True, eq=False)
class Written:
    """Images of continuous tokens, and what each cost."""

    tokens: Tensor
    """[B, L, D]"""
    rows: list[ImageState]


@final
class PathWriter:
    """Writes images with a rule, or by plain decoding without a draft."""

    def __init__(
        self,
        target: ContinuousTarget,
        draft: ContinuousTarget | None = None,
        rule: PathRule | None = None,
        settings: ContinuousSettings | None = None,
    ) -> None:
        sizes = [(one.schedule, one.dim, one.num_tokens) for one in (target, draft) if one is not None]
        if len(set(sizes)) > 1:
            raise OptionError("target and draft differ in schedule or size of tokens; train both with one recipe")
        drafter = NoGuesses() if draft is None else PathDraftModel(draft)
        self.engine = PathEngine(target, drafter, rule or JointPath(), settings or ContinuousSettings())

    def write(self, labels: Tensor, chance: torch.Generator) -> Written:
        """An image of each label. Rows that are written leave the batch."""
        batch = self.engine.start(labels, chance)
        end, rows, places = self.engine.target.num_tokens, batch.rows, list(range(len(labels)))
        tokens = torch.zeros(len(labels), end, self.engine.target.dim, dtype=batch.tokens.dtype)
        while places:
            self.engine.step(batch)
            kept = [b for b, row in enumerate(batch.rows) if len(row.rounds) < end]
            if len(kept) < len(places):
                tokens[places] = batch.tokens[:, 1:]  # rows that go on are written again at their end
                places = [places[b] for b in kept]
                batch = batch.narrow(kept) if kept else batch
        return Written(tokens, rows)


@torch.no_grad()
def write_plain(model: ContinuousTarget, labels: Tensor, chance: torch.Generator) -> Tensor:
    """[B, L, D] images written token by token with one model, which reads the whole prefix again for each token: the oracle of
    ``PathEngine``."""
    tokens = torch.zeros(len(labels), 0, model.dim, dtype=model.dtype)
    for _ in range(model.num_tokens):
        chain = model.chain(model.conditions(tokens, labels)[:, -1])
        tokens = torch.cat([tokens, denoised(chain, fresh_noise(chain, chance)).tokens[:, None]], 1)
    return tokens
