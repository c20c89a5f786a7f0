"""Searches for sublayers that the target can skip. A skip set is scored by how often the target without it agrees with the
whole target.

A skip set is a choice of n among the attention and MLP sublayers of the inner layers. Its *matchness* on a stretch of text is
measured in one pass over the stretch. It is the share of positions where the target without these sublayers says (greedily)
what the whole target says. Sets are tried at random, near the best one, and now and then where a Gaussian process fitted to
earlier trials expects most. (Xia et al. 2024, SWIFT, arXiv 2410.06916; Zhang et al. 2023, Draft & Verify, arXiv 2309.08168,
search offline. Searching near the best set is our addition.)

    promise(s) = mean(s) + 2.5 sd(s),     covariance(s, s') = v exp(-|s xor s'| / n),   noise 0.01

A search is a lasting memory: it may be shared by all requests and outlive them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache
from outrider.core.lasting_memory import LastingMemory
from outrider.core.layered_target import LayeredTarget
from outrider.core.route import Route
from outrider.core.tree import TokenTree

SkipSet = frozenset[int]
"""Coordinates of a ``SkipSpace``."""
_KAPPA, _NOISE = 2.5, 0.01
_REMEMBERED = 256
"""Newest trials to which the Gaussian process is fitted."""
_POOL = 256
"""Candidate sets from which the most promising is chosen."""


@dataclass(frozen=True)
class SkipSpace:
    """Sublayers that may be skipped, attention first: all but those of the first and the last layer."""

    num_layers: int
    share: float
    """Share of them that is skipped."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise OptionError(f"skip_share = {self.share!r} is not valid; use a number between 0 and 1, such as 0.45")

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The inner layers; all layers if the model is too small to have any."""
        return tuple(range(1, self.num_layers - 1)) if self.num_layers > 3 else tuple(range(self.num_layers))

    @property
    def size(self) -> int:
        return 2 * len(self.layers)

    @property
    def num_skipped(self) -> int:
        return max(1, int(self.size * self.share))

    def route(self, skipped: SkipSet) -> Route:
        count = len(self.layers)
        attention = [self.layers[i] for i in skipped if i < count]
        return Route.without(self.num_layers, attention=attention, mlp=[self.layers[i - count] for i in skipped if i >= count])

    def first(self) -> SkipSet:
        """The first set of a search: every second sublayer of each kind, as far as they may be skipped."""
        count = len(self.layers)
        alternating = [kind + i for i in range(0, count, 2) for kind in (0, count)]
        others = [i for i in range(self.size) if i not in alternating]
        return frozenset([*alternating, *others][: self.num_skipped])

    def random(self, source: random.Random) -> SkipSet:
        return frozenset(source.sample(range(self.size), self.num_skipped))

    def near(self, skipped: SkipSet, source: random.Random) -> SkipSet:
        """A set with one or two sublayers exchanged."""
        taken = sorted(set(range(self.size)) - skipped)
        count = min(source.choice((1, 1, 2)), len(taken), len(skipped))
        return skipped - set(source.sample(sorted(skipped), count)) | set(source.sample(taken, count))


@dataclass(frozen=True)
class SearchLimits:
    """When a search ends, and how it spends its trials."""

    max_score: float = 0.95
    patience: int = 300
    """Trials in a row without a better set."""
    max_trials: int = 1000
    model_every: int = 25
    """Period of the trials that the Gaussian process chooses."""


@final
class SkipSearch(LastingMemory):
    """The trials and the best set so far. One object serves all requests of a method."""

    def __init__(self, space: SkipSpace, limits: SearchLimits | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.space, self._seed = space, seed
        self.limits = limits or SearchLimits()
        self.best = space.first()
        self.score = 0.0
        """Matchness of the best set, when it was last measured."""
        self.num_trials = 0
        self.num_stale = 0
        self._source = random.Random(seed)
        self._tried: list[tuple[SkipSet, float]] = []

    def clear(self) -> None:
        with self.lock:
            self.best, self.score = self.space.first(), 0.0
            self.num_trials = self.num_stale = 0
            self._source, self._tried = random.Random(self._seed), []

    @property
    def route(self) -> Route:
        return self.space.route(self.best)

    @property
    def is_active(self) -> bool:
        limits = self.limits
        ended = self.num_trials >= limits.max_trials or self.num_stale >= limits.patience or self.score >= limits.max_score
        return not ended and self.space.num_skipped < self.space.size

    def suggest(self) -> SkipSet:
        """The next set to try."""
        with self.lock:
            if self._tried and (self.num_trials + 1) % self.limits.model_every == 0:
                return self._promising()
            return self.space.near(self.best, self._source) if self._source.random() < 0.5 else self.space.random(self._source)

    def measured(self, score: float) -> None:
        """Set the best set's score on a new stretch of text. Scores of different stretches are not compared."""
        with self.lock:
            self.score = score

    def record(self, skipped: SkipSet, score: float) -> None:
        """Add a trial on the stretch where the best set was scored."""
        with self.lock:
            self.num_trials += 1
            self.num_stale += 1
            self._tried = [*self._tried[1 - _REMEMBERED :], (skipped, score)]
            if score > self.score:
                self.best, self.score, self.num_stale = skipped, score, 0

    def _promising(self) -> SkipSet:
        pool = [self.space.random(self._source) for _ in range(_POOL // 2)]
        pool += [self.space.near(self.best, self._source) for _ in range(_POOL // 2)]
        promise = upper_bounds(self._vectors([s for s, _ in self._tried]), [y for _, y in self._tried], self._vectors(pool))
        return pool[int(promise.argmax())]

    def _vectors(self, sets: Sequence[SkipSet]) -> Tensor:
        """[n, D] one-hot, scaled so that squared distances are |s xor s'| / n."""
        vectors = torch.zeros(len(sets), self.space.size, dtype=torch.float64)
        for row, skipped in enumerate(sets):
            vectors[row, sorted(skipped)] = self.space.num_skipped**-0.5
        return vectors


def upper_bounds(tried: Tensor, scores: Sequence[float], pool: Tensor) -> Tensor:
    """[m] mean + 2.5 standard deviations at ``pool`` [m, D] of a Gaussian process that saw ``scores`` at ``tried`` [n, D]."""
    seen = torch.tensor(scores, dtype=torch.float64)
    mean, scale = seen.mean(), seen.std(correction=0).clamp(min=1e-3)
    inner = torch.exp(-torch.cdist(tried, tried).square()) + _NOISE * torch.eye(len(tried), dtype=torch.float64)
    factor = torch.linalg.cholesky(inner)
    across = torch.exp(-torch.cdist(tried, pool).square())
    weights = torch.cholesky_solve(((seen - mean) / scale)[:, None], factor)[:, 0]
    spread = (1 - torch.linalg.solve_triangular(factor, across, upper=False).square().sum(0)).clamp(min=0).sqrt()
    return mean + scale * (weights @ across + _KAPPA * spread)


@final
class Probe:
    """A stretch of text, a cache of what precedes it, and the whole target's choices along it."""

    def __init__(self, target: LayeredTarget, before: Cache, tokens: Sequence[int]) -> None:
        """``before`` has one row. The probe writes to it."""
        self._target, self._cache = target, before
        self._tree = TokenTree.chain(torch.tensor([list(tokens)], device=target.device))
        self._wanted = self._choices(Route.first(target.num_layers, target.num_layers))
        self._best: SkipSet | None = None

    def matchness(self, route: Route) -> float:
        """Share of the positions where the route's choice equals the target's."""
        return float((self._choices(route) == self._wanted).double().mean())

    def trial(self, search: SkipSearch) -> None:
        """One step of a search: one pass over the stretch."""
        if self._best != search.best:  # new here, or changed elsewhere
            self._best = search.best
            search.measured(self.matchness(search.route))
            return
        skipped = search.suggest()
        search.record(skipped, self.matchness(search.space.route(skipped)))
        self._best = search.best

    def _choices(self, route: Route) -> Tensor:
        return self._target.logits(self._target.exit(self._tree, self._cache, route=route)).argmax(-1)


def find_skips(
    target: LayeredTarget, texts: Sequence[Sequence[int]], *, share: float = 0.45, num_trials: int = 300, seed: int = 0
) -> SkipSearch:
    """Search offline on tokenized texts; every set is tried on all of them. The result's ``route`` and ``score`` are the
    best found. The skipped layers are options ``skip_attention`` and ``skip_mlp`` of method 'draft-verify'."""
    probes = [Probe(target, target.new_cache(1), text) for text in texts if text]
    if not probes:
        raise OptionError("there is no text to search on; give at least one with tokens in it")
    limits = SearchLimits(max_score=1.0, patience=num_trials, max_trials=num_trials)
    search = SkipSearch(SkipSpace(target.num_layers, share), limits, seed=seed)

    def score(skipped: SkipSet) -> float:
        return sum(probe.matchness(search.space.route(skipped)) for probe in probes) / len(probes)

    search.measured(score(search.best))
    while search.is_active:
        skipped = search.suggest()
        search.record(skipped, score(skipped))
    return search
