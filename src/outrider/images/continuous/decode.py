"""Speculative decoding of continuous tokens: a draft model writes a window of tokens, the target judges all of them at once.

    repeat:  draft g tokens with the small model, one after the other, and keep their paths
             one pass of the target's causal model over them gives every token's condition
             a rule judges every path;  tokens before the first rejected one stay, the rejected one is the rule's own
             where all stay, one more token comes from the target

The first tokens may be the target's alone (``prefill``): the paper found the draft worst there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.images.continuous.paths import Chain, Paths, Schedule, denoised, fresh_noise
from outrider.images.continuous.rules import Judged, PathRule


class ContinuousModel(ABC):
    """A causal model over continuous tokens with a diffusion head."""

    schedule: Schedule
    num_tokens: int
    """L: tokens of one image."""
    dim: int

    @abstractmethod
    def conditions(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[B, N + 1, H] the condition of every next token after the prefixes of [B, N, D]."""

    @abstractmethod
    def chain(self, conditions: Tensor) -> Chain:
        """The denoiser of M tokens with conditions [M, H]."""


@final
@dataclass(frozen=True)
class ContinuousSettings:
    """How much is drafted."""

    window: int = 4
    """g: drafted tokens of a round."""
    prefill: float = 0.0
    """Share of the tokens that the target writes alone at first."""

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 <= self.prefill <= 1:
            values = f"window = {self.window}, prefill = {self.prefill}"
            raise OptionError(f"{values} is not valid; use a window from 1 on and a share from 0 to 1")


@final
@dataclass(frozen=True, eq=False)
class Written:
    """Images of continuous tokens, and what they cost."""

    tokens: Tensor
    """[B, L, D]"""
    num_passes: Tensor
    """[B] passes of the target's causal model."""
    num_kept: Tensor
    """[B]"""
    num_judged: Tensor
    """[B] drafted tokens up to the first rejected one of each round."""
    num_paths: Tensor
    """[B] target paths that were run, residual ones included."""


@torch.no_grad()
def write_plain(model: ContinuousModel, labels: Tensor, chance: torch.Generator) -> Tensor:
    """[B, L, D] token after token from one model."""
    tokens = torch.zeros(len(labels), 0, model.dim)
    for _ in range(model.num_tokens):
        chain = model.chain(model.conditions(tokens, labels)[:, -1])
        tokens = torch.cat([tokens, denoised(chain, fresh_noise(chain, chance)).tokens[:, None]], 1)
    return tokens


@final
class Writer:
    """Writes B images at once, each at its own pace."""

    def __init__(
        self,
        target: ContinuousModel,
        draft: ContinuousModel,
        rule: PathRule,
        settings: ContinuousSettings | None = None,
    ) -> None:
        if target.schedule != draft.schedule or (target.dim, target.num_tokens) != (draft.dim, draft.num_tokens):
            raise OptionError("target and draft differ in schedule or size of tokens; train both with one recipe")
        self.target, self.draft, self.rule = target, draft, rule
        self.settings = settings or ContinuousSettings()

    @torch.no_grad()
    def write(self, labels: Tensor, chance: torch.Generator) -> Written:
        state = _State(self.target, labels)
        alone = round(self.settings.prefill * self.target.num_tokens)
        while bool((state.lengths < self.target.num_tokens).any()):
            self._round(state, chance, drafts=bool((state.lengths >= alone).all()))
        end = self.target.num_tokens
        return Written(state.tokens[:, :end], state.passes, state.kept, state.judged, state.paths)

    def _round(self, state: _State, chance: torch.Generator, *, drafts: bool) -> None:
        """Draft, one pass of the target, judge, and one token more for every row."""
        window = self.settings.window if drafts else 0
        drafted = [self._drafted(state, step, chance) for step in range(window)]
        conditions = self.target.conditions(state.tokens[:, : state.reach(window)], state.labels)
        judged = self._judged(state, conditions, drafted, chance) if window else None
        kept = torch.zeros_like(state.lengths) if judged is None else judged.kept.cumprod(1).sum(1)
        kept = torch.minimum(kept, state.room)
        bonus = self.target.chain(_at(conditions, state.lengths + kept))
        own = denoised(bonus, fresh_noise(bonus, chance)).tokens
        if judged is not None:
            rejected = judged.tokens[torch.arange(len(kept)), kept.clamp(max=window - 1)]
            own = torch.where((kept < window)[:, None], rejected, own)
        state.count(kept, window, None if judged is None else judged.num_paths)
        state.put(state.lengths + kept, own)
        state.lengths = (state.lengths + kept + 1).clamp(max=self.target.num_tokens)

    def _drafted(self, state: _State, step: int, chance: torch.Generator) -> _Drafted:
        """One more token of the draft behind every row, written where it would stand."""
        place = state.lengths + step
        conditions = _at(self.draft.conditions(state.tokens[:, : state.reach(step)], state.labels), place)
        chain = self.draft.chain(conditions)
        noise = fresh_noise(chain, chance)
        found = _Drafted(conditions, noise, denoised(chain, noise).points)
        state.put(place, found.points[0])
        return found

    def _judged(self, state: _State, wanted: Tensor, drafted: list[_Drafted], chance: torch.Generator) -> Judged:
        """The verdict on a window: tokens [B, g, D], kept [B, g], paths [B, g]."""
        window, count = len(drafted), len(state.lengths)
        p = self.target.chain(torch.cat([_at(wanted, state.lengths + step) for step in range(window)]))
        q = self.draft.chain(torch.cat([one.conditions for one in drafted]))
        points, noise = torch.cat([one.points for one in drafted], 1), torch.cat([one.noise for one in drafted], 1)
        found = self.rule.judge(Paths(points), noise, p=p, q=q, chance=chance)
        tokens = found.tokens.view(window, count, -1).transpose(0, 1)
        return Judged(tokens, found.kept.view(window, count).T.long(), found.num_paths.view(window, count).T)


class _Drafted(NamedTuple):
    """One drafted token of every row."""

    conditions: Tensor
    """[B, H]"""
    noise: Tensor
    """[T + 1, B, D]"""
    points: Tensor
    """[T + 1, B, D]"""


class _State:
    """Images that are being written."""

    def __init__(self, model: ContinuousModel, labels: Tensor) -> None:
        count = len(labels)
        self.labels, self._end = labels, model.num_tokens
        self.tokens = torch.zeros(count, model.num_tokens, model.dim)
        self.lengths, self.passes, self.kept, self.judged, self.paths = (
            torch.zeros(count, dtype=torch.int64) for _ in range(5)
        )

    @property
    def room(self) -> Tensor:
        """[B] tokens that are still to be written."""
        return self._end - self.lengths

    def reach(self, ahead: int) -> int:
        """Tokens that have to be read for conditions ``ahead`` places behind the longest row."""
        return min(int(self.lengths.max()) + ahead, self._end - 1)

    def put(self, places: Tensor, tokens: Tensor) -> None:
        """Write a token per row; places behind the image are dropped."""
        rows = (places < self._end).nonzero()[:, 0]
        self.tokens[rows, places[rows]] = tokens[rows]

    def count(self, kept: Tensor, window: int, paths: Tensor | None) -> None:
        """Add a round to the statistics of the rows that are still being written."""
        running = self.room > 0
        judged = torch.minimum(kept + 1, self.room.clamp(max=window))
        self.passes += running
        self.kept += kept * running
        self.judged += judged * running
        if paths is not None:
            self.paths += (paths * (torch.arange(window) < judged[:, None])).sum(1) * running
        self.paths += (kept == window) & (self.room > window)


def _at(values: Tensor, places: Tensor) -> Tensor:
    """[B, H] row ``places[b]`` of ``values[b]``; places behind the end read the last one."""
    return values[torch.arange(len(values)), places.clamp(max=values.shape[1] - 1)]
