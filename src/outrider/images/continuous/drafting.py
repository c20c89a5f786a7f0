"""Drafters of continuous tokens: a small model of the same family, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outrider.core.interfaces import Cache
from outrider.core.plan import Plan
from outrider.images.continuous.interfaces import ContinuousTarget, PathContext, PathDraft, PathDrafter, PathGuesses
from outrider.images.continuous.paths import Paths, denoised, fresh_noise


@final
class NoGuesses(PathDrafter):
    """Plain decoding: the target writes every token."""

    def start(self, num_rows: int) -> None:
        del num_rows

    def propose(self, state: Cache | None, context: PathContext, plan: Plan) -> PathDraft:
        del state, plan
        return context.without_guesses()

    def observe(self, state: Cache | None, lengths: Sequence[int]) -> None:
        del state, lengths


@final
class PathDraftModel(PathDrafter):
    """Drafts token after token with a small model, and keeps every path. Its state is its cache."""

    def __init__(self, model: ContinuousTarget) -> None:
        self.model = model

    def start(self, num_rows: int) -> Cache:
        return self.model.new_cache(num_rows)

    def propose(self, state: Cache | None, context: PathContext, plan: Plan) -> PathDraft:
        assert state is not None, "made by start"
        depth, window = torch.tensor(plan.max_depth), max(plan.max_depth)
        nodes = torch.cat([context.roots[:, None], context.tokens.new_zeros(len(depth), window, self.model.dim)], 1)
        conditions, found = self._read(state, context), list[tuple[Tensor, ...]]()
        for step in range(window):
            rows = (depth > step).nonzero()[:, 0]
            chain = self.model.chain(conditions[rows])
            noise = fresh_noise(chain, context.chance)
            points = denoised(chain, noise).points
            nodes[rows, step + 1] = points[0]
            found.append((rows, torch.full_like(rows, step), conditions[rows], points.transpose(0, 1), noise.transpose(0, 1)))
            if step + 1 < window:
                conditions = self.model.score(nodes[:, step + 1 : step + 2], context.labels, state)[:, 0]
                state.commit([[0]] * len(depth))
        rows, depths, conditions, points, noise = (torch.cat(parts) for parts in zip(*found, strict=True))
        paths = Paths(points.transpose(0, 1))
        return PathDraft(
            nodes, plan.max_depth, PathGuesses(rows, depths, paths, noise.transpose(0, 1), self.model.chain(conditions))
        )

    def observe(self, state: Cache | None, lengths: Sequence[int]) -> None:
        """Drop rejected guesses from the cache. Accepted ones stay, except the new root."""
        assert state is not None, "made by start"
        state.truncate([min(own, length - 1) for own, length in zip(state.lengths, lengths, strict=True)])

    def _read(self, cache: Cache, context: PathContext) -> Tensor:
        """[B, H] conditions after the roots. Reads and commits what the cache lacks: the root, and tokens that were not drafted
        here."""
        counts = [length - own for length, own in zip(context.lengths, cache.lengths, strict=True)]
        rows, places = torch.arange(len(counts)), torch.tensor(cache.lengths)[:, None] + torch.arange(max(counts))
        missing = context.tokens[rows[:, None], places.clamp(max=self.model.num_tokens)]
        found = self.model.score(missing, context.labels, cache)
        cache.commit([range(count) for count in counts])
        return found[rows, torch.tensor(counts) - 1]
