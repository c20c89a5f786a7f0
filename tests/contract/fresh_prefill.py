"""The cache check of every kind of drafter: after a commit, a cache holds what a prefill of the tokens so far would."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.cache.slots import LayeredCache
from outrider.core.interfaces import Cache, Target
from outrider.core.request import Request, RequestState
from outrider.engine.step import Engine


def assert_near(mine: torch.Tensor, other: torch.Tensor) -> None:
    """``torch.testing.assert_close`` is asked only for its words: it takes ten times as long as the comparison."""
    if mine.shape != other.shape or not torch.allclose(mine, other, atol=1e-5, rtol=1e-5):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def assert_fresh(model: Target, cache: Cache, rows: Sequence[RequestState], *, most_lag: int = 0) -> None:
    """``cache`` may lack the last ``most_lag`` tokens of a running row; a finished one may be cut inside an accepted run."""
    fresh = model.new_cache(len(rows))
    model.prefill([state.tokens[:-1] for state in rows], fresh)
    assert isinstance(cache, LayeredCache) and isinstance(fresh, LayeredCache)
    for row, state in enumerate(rows):
        length = cache.lengths[row]
        if not state.is_finished:
            assert fresh.lengths[row] == len(state.tokens) - 1
            assert 0 <= fresh.lengths[row] - length <= most_lag
        used = min(length, fresh.lengths[row])
        for layer in range(model.num_layers):
            for mine, other in zip(cache.entries(layer), fresh.entries(layer), strict=True):
                assert_near(mine[row, :, :used], other[row, :, :used])


def assert_always_fresh(engine: Engine, requests: Sequence[Request]) -> None:
    """After every commit of these requests, the target's cache is that of a fresh prefill."""
    batch = engine.start(list(requests))
    while batch.rows:
        engine.step(batch)
        assert_fresh(engine.target, batch.cache, batch.rows)
        batch = batch.without_finished()
