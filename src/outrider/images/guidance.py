"""Classifier-free guidance as a target: two rows of the model share one choice.

Every request is two rows of the model: one with its class token, and one with the token for no class. Both read the same codes,
and their logits are mixed before anything is drawn (Ho & Salimans 2022, arXiv 2207.12598):

    logits = unconditional + scale * (conditional - unconditional)          scale 1: the conditional model alone

To the engine this is one target with one law, so every drafter, rule and cache works on it as on any other. Lossless methods
stay lossless: speculation is exact for the guided law. A pass reads twice the rows. In captured rounds a slot has both rows,
and they share its choice on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch
from torch import Tensor

from outrider.core.device_round import PairedRows
from outrider.core.draft import Resume
from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache, Target
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.wrapped_target import WrappedTarget

Item = TypeVar("Item")


@final
class GuidedCache(Cache):
    """A cache of the model with two rows for every request: 2b conditional, 2b + 1 unconditional."""

    def __init__(self, inner: Cache) -> None:
        self.inner = inner

    @property
    def lengths(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride] - follows from the inner rows
        return self.inner.lengths[::2]

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self.inner.reserve(num_nodes, start=start)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.inner.commit(_twice(paths))

    def truncate(self, lengths: Sequence[int]) -> None:
        self.inner.truncate(_twice(lengths))

    def fork(self, rows: Sequence[int]) -> GuidedCache:
        return GuidedCache(self.inner.fork(_pairs(rows)))

    def narrow(self, rows: Sequence[int]) -> GuidedCache:
        return GuidedCache(self.inner.narrow(_pairs(rows)))

    def join(self, other: Cache) -> GuidedCache:
        assert isinstance(other, GuidedCache), "only caches of one kind can be joined"
        return GuidedCache(self.inner.join(other.inner))


def _twice(items: Sequence[Item]) -> list[Item]:
    return [item for item in items for _ in range(2)]


def _pairs(rows: Sequence[int]) -> list[int]:
    """The model's two rows of each request."""
    return [row for request in rows for row in (2 * request, 2 * request + 1)]


@final
@dataclass(frozen=True)
class Guidance(PairedRows):
    """Classifier-free guidance: the second row does not know the class, and the logits of both rows are mixed."""

    scale: float
    classes: range
    """Tokens that name classes."""
    nothing: int
    """The token that stands for no class."""

    def second(self, tokens: Tensor) -> Tensor:
        is_class = (tokens >= self.classes.start) & (tokens < self.classes.stop)
        return torch.where(is_class, self.nothing, tokens)

    def mixed(self, logits: Tensor) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return torch.lerp(logits[1::2], logits[::2], self.scale)

    def held(self, cache: Cache) -> Cache:
        return cache.inner if isinstance(cache, GuidedCache) else cache


@final
class Guided(WrappedTarget[Target]):
    """A class-conditional model steered towards its class."""

    def __init__(self, inner: Target, *, scale: float, classes: range, nothing: int) -> None:
        """``classes`` are the tokens that name classes; ``nothing`` is the token that names none."""
        if not scale >= 0:
            raise OptionError(f"guidance = {scale} is not valid; use 0 (no class), 1 (no guidance) or more")
        super().__init__(inner)
        self._guidance = Guidance(scale, classes, nothing)
        # states are those of one row, and a guided law is made of two
        self.traits = replace(self.traits, can_read_out=False, captured_pairs=self._guidance)

    @property
    def captured_as(self) -> Target:
        """The target of captured rounds: the model, with two rows per slot. None if the model itself is captured as another
        target."""
        return self.inner if self.inner.captured_as is self.inner else self

    def new_cache(self, batch_size: int) -> GuidedCache:
        return GuidedCache(self.inner.new_cache(2 * batch_size))

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        classes, nothing = self._guidance.classes, self._guidance.nothing
        pairs = [side for row in rows for side in (list(row), [nothing if token in classes else token for token in row])]
        states = self.inner.prefill(pairs, _inner(cache), taps=taps)
        return {tap: of_rows[::2] for tap, of_rows in states.items()}

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        assert resume is None, "a guided pass cannot go on from earlier layers"
        scores = self.inner.score(self._both(tree), _inner(cache), taps=taps, start=start)
        return Scores(self._guidance.mixed(scores.logits), {tap: states[::2] for tap, states in scores.taps.items()})

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the conditional rows alone, because their states do not contain the other rows."""
        return self.inner.logits(hidden)

    def _both(self, tree: TokenTree) -> TokenTree:
        """Every tree twice, the second time without its class."""
        tokens = torch.stack([tree.tokens, self._guidance.second(tree.tokens)], 1).flatten(0, 1)
        return TokenTree(tokens, tree.parents.repeat_interleave(2, 0), tuple(_twice(tree.sizes)), tree.is_chain)


def _inner(cache: Cache) -> Cache:
    assert isinstance(cache, GuidedCache), "a guided model works on the caches it made"
    return cache.inner
