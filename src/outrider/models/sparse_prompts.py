"""A target that reads only part of every prompt (LOSSY): a small model chooses the important tokens, and the others are left
out.

Kept tokens keep their positions, so to the target the prompt has its full length, with gaps. The text after the prompt is read
and written in full. The law is the target's after the shortened prompt, which differs from that after the full prompt;
docs/sparse_prompts.md measures by how much. Speculation is lossless with respect to the law after the shortened prompt.

Rotary positions act through distances alone, so the whole row can be shifted. With m tokens left out, the token at position p
is rotated as p - m. The first token after the prompt is then at its own slot, so later passes need not know about the gaps.

    slots       0 .. k - 1                      k, k + 1, ...
    turned as   p_0 - m .. p_(k-1) - m          k, k + 1, ...          k tokens kept of n, m = n - k
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.errors import OptionError
from outrider.core.interfaces import Cache, Target
from outrider.core.placing_target import PlacingTarget
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.wrapped_target import WrappedTarget


@dataclass(frozen=True)
class _Hole:
    """The part of its prompt that a row left out."""

    num_missing: int = 0
    end: int = 0
    """Length of the prompt. A row cannot be truncated before it."""


@final
class SparseCache(Cache):
    """A cache that counts the left-out tokens among the committed ones."""

    def __init__(self, inner: Cache, holes: Sequence[_Hole]) -> None:
        self.inner, self.holes = inner, list(holes)

    @property
    def lengths(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride] - follows from the inner rows
        return [length + hole.num_missing for length, hole in zip(self.inner.lengths, self.holes, strict=True)]

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        self.inner.reserve(num_nodes, start=start)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.inner.commit(paths)

    def truncate(self, lengths: Sequence[int]) -> None:
        pairs = list(zip(lengths, self.holes, strict=True))
        kept = [hole if not hole.num_missing or length >= hole.end else None for length, hole in pairs]
        self.inner.truncate([0 if hole is None else length - hole.num_missing for length, hole in zip(lengths, kept)])
        self.holes = [hole or _Hole() for hole in kept]

    def fork(self, rows: Sequence[int]) -> SparseCache:
        return SparseCache(self.inner.fork(rows), [self.holes[row] for row in rows])

    def narrow(self, rows: Sequence[int]) -> SparseCache:
        return SparseCache(self.inner.narrow(rows), [self.holes[row] for row in rows])

    def join(self, other: Cache) -> SparseCache:
        return SparseCache(self.inner.join(_sparse(other).inner), [*self.holes, *_sparse(other).holes])

    def put(self, row: int, fresh: SparseCache) -> None:
        """Replace a row by the only one of ``fresh``."""
        rows = [fresh.inner if each == row else self.inner.fork([each]) for each in range(self.batch_size)]
        self.inner, self.holes[row] = reduce(lambda one, other: one.join(other), rows), fresh.holes[0]


@final
class SparsePrompts(WrappedTarget[PlacingTarget]):
    """LOSSY: a model that reads some tokens of every prompt and leaves the others out."""

    def __init__(self, inner: Target, choose_kept: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """``choose_kept`` returns the positions of a prompt to read, in order, such as ``ImportantTokens``."""
        super().__init__(_placing(inner))
        self.choose_kept = choose_kept
        self.traits = replace(self.traits, reads_whole=True, why_together=" (it reads a part of the prompt)")

    def new_cache(self, batch_size: int) -> SparseCache:
        return SparseCache(self.inner.new_cache(batch_size), [_Hole()] * batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> Mapping[int, list[Tensor]]:
        """Read the first tokens of a row, its prompt, in part, and later ones in full. A left-out token has the tapped
        states of the last read token before it."""
        sparse = _sparse(cache)
        begins = [bool(row) and length == 0 for row, length in zip(rows, sparse.lengths, strict=True)]
        rest = [[] if begins_here else row for row, begins_here in zip(rows, begins, strict=True)]
        found = {tap: list(states) for tap, states in self.inner.prefill(rest, sparse.inner, taps=taps).items()}
        for row in (row for row, begins_here in enumerate(begins) if begins_here):
            fresh, states = self._read(rows[row], taps)
            sparse.put(row, fresh)
            for tap in taps:
                found[tap][row] = states[tap]
        return found

    def _read(self, prompt: Sequence[int], taps: Sequence[int]) -> tuple[SparseCache, dict[int, Tensor]]:
        """A new row with the kept tokens of a prompt, and tapped states [len, H] for all of it."""
        kept, cache = self.choose_kept(prompt), self.inner.new_cache(1)
        num_missing = len(prompt) - len(kept)
        reading = self.inner.placed([position - num_missing for position in kept]) if num_missing else self.inner
        tapped = reading.prefill([[prompt[position] for position in kept]], cache, taps=taps)
        before = torch.searchsorted(torch.tensor(list(kept)), torch.arange(len(prompt)), right=True).sub_(1).clamp_(min=0)
        states = {tap: of_rows[0][before.to(self.device)] for tap, of_rows in tapped.items()}
        return SparseCache(cache, [_Hole(num_missing, len(prompt))]), states

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        return self.inner.score(tree, _sparse(cache).inner, taps=taps, start=start, resume=resume)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)


def _sparse(cache: Cache) -> SparseCache:
    assert isinstance(cache, SparseCache), "a target of sparse prompts works on the caches it made"
    return cache


def _placing(target: Target) -> PlacingTarget:
    if not isinstance(target, PlacingTarget):
        what = f"keep_prompt is not available for this target ({type(target).__name__}), which reads whole prompts"
        raise OptionError(f"{what}; use a model of the lean decoder, or leave keep_prompt out")
    if target.has_windows:
        raise OptionError("keep_prompt is not available for a model with sliding windows, which count slots; leave it out")
    return target
