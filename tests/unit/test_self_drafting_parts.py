"""The parts of self-drafting that need no target: skip sets and their search, exit statistics, the threshold that follows."""

from __future__ import annotations

import random

import pytest
import torch
from thinned import thinned_model

from outrider.core.errors import OptionError
from outrider.drafters.itself.draft_verify import DraftVerifyOptions, Matchness
from outrider.drafters.itself.exit_statistics import ExitStatistics
from outrider.drafters.itself.skip_search import SearchLimits, SkipSearch, SkipSpace, find_skips, upper_bounds


def test_a_skip_space_leaves_the_first_and_the_last_layer_alone() -> None:
    space, source = SkipSpace(16, 0.45), random.Random(0)
    assert space.layers == tuple(range(1, 15)) and space.size == 28 and space.num_skipped == 12
    sets = [space.first(), *(space.random(source) for _ in range(20))]
    sets += [space.near(skipped, source) for skipped in sets]
    for skipped in sets:
        route = space.route(skipped)
        assert len(skipped) == 12 and route.share == pytest.approx(1 - 12 / 32)
        assert route.attention[0] and route.mlp[0] and route.attention[-1] and route.mlp[-1]
    for before, after in zip(sets[:21], sets[21:], strict=True):
        assert 2 <= len(before ^ after) <= 4
    assert SkipSpace(2, 0.45).size == 4, "a model without inner layers offers all of them"


def test_the_first_set_is_every_second_inner_layer() -> None:
    route = SkipSpace(16, 0.5).route(SkipSpace(16, 0.5).first())
    expected = tuple(layer not in range(1, 15, 2) for layer in range(16))
    assert route.attention == expected and route.mlp == expected


def test_a_search_keeps_the_best_and_ends() -> None:
    """A score that counts agreeing sublayers: the search climbs, stays where it is best, and stops when told to."""
    space = SkipSpace(10, 0.5)
    ideal = space.random(random.Random(3))
    search, history = SkipSearch(space, SearchLimits(max_score=1.0, patience=400, max_trials=600)), list[float]()
    search.measured(len(search.best & ideal) / len(ideal))
    while search.is_active:
        skipped = search.suggest()
        assert len(skipped) == space.num_skipped
        search.record(skipped, len(skipped & ideal) / len(ideal))
        history.append(search.score)
    assert history == sorted(history) and search.score == 1.0 and search.best == ideal
    assert search.num_trials == len(history) < 600
    tired = SkipSearch(space, SearchLimits(patience=5))
    tired.measured(0.9)
    for _ in range(5):
        assert tired.is_active
        tired.record(tired.suggest(), 0.1)
    assert not tired.is_active and tired.best == space.first()
    assert not SkipSearch(space, SearchLimits(max_trials=0)).is_active


def test_upper_bounds_are_those_of_a_gaussian_process() -> None:
    """Against the textbook formulas with an explicit inverse; sure where it has looked, unsure far away."""
    torch.manual_seed(0)
    tried, pool = torch.randn(7, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    scores = [0.1, 0.5, 0.4, 0.9, 0.3, 0.2, 0.6]
    y = torch.tensor(scores, dtype=torch.float64)
    mean, scale = y.mean(), y.std(correction=0)

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(-(a[:, None] - b[None]).square().sum(-1))

    inverse = torch.linalg.inv(kernel(tried, tried) + 0.01 * torch.eye(7, dtype=torch.float64))
    across = kernel(tried, pool)
    expected_mean = across.T @ inverse @ ((y - mean) / scale)
    variance = 1 - (across * (inverse @ across)).sum(0)
    torch.testing.assert_close(upper_bounds(tried, scores, pool), mean + scale * (expected_mean + 2.5 * variance.sqrt()))
    far, seen = upper_bounds(tried, scores, torch.stack([tried[3], tried[3] + 100])).flip(0)
    assert far == pytest.approx(float(mean + 2.5 * scale)) and float(seen) == pytest.approx(0.9, abs=0.1)


def test_an_offline_search_finds_idle_sublayers() -> None:
    target = thinned_model(idle_attention=(1, 3, 4), idle_mlp=(2, 4))
    texts = [[random.Random(i).randrange(60) for _ in range(30)] for i in range(2)]
    found = find_skips(target, texts, share=0.4, num_trials=150)
    assert found.score == 1.0
    assert {layer for layer in range(6) if not found.route.attention[layer]} <= {1, 3, 4}
    assert {layer for layer in range(6) if not found.route.mlp[layer]} <= {2, 4}
    with pytest.raises(OptionError, match="no text"):
        find_skips(target, [[]])


def test_exit_statistics_choose_what_gives_most_tokens_per_layer() -> None:
    """Against the formula by hand, over all exits and lengths."""
    memory = ExitStatistics((2, 4, 8), 12, decay=1.0)
    for layer, right in ((2, 30), (4, 85), (8, 99)):
        hits = torch.arange(100) < right
        memory.learn(layer, hits, torch.where(hits, 0.9, 0.3))
        assert memory.alpha(layer) == pytest.approx((right + 0.5) / 101)
        assert memory.threshold(layer) == pytest.approx(0.6)
    by_hand = {
        (layer, depth): (1 - a ** (depth + 1)) / (1 - a) / (12 + depth * layer)
        for layer in (2, 4, 8)
        for a in [memory.alpha(layer)]
        for depth in range(19)
    }
    choice = memory.choose(18)
    assert (choice.exit, choice.depth) == max(by_hand, key=by_hand.__getitem__)
    assert memory.tokens_per_layer(4, 3) == pytest.approx(by_hand[4, 3])
    assert memory.choose(0).depth == 0


def test_exit_statistics_forget_and_know_what_they_have_not_seen() -> None:
    memory = ExitStatistics((1,), 4, decay=0.5)
    assert memory.alpha(1) == 0.5 and memory.threshold(1) == 0.5
    memory.learn(1, torch.ones(8, dtype=torch.bool), torch.full((8,), 0.8))
    assert memory.threshold(1) == pytest.approx(0.4), "never wrong so far: only the right guesses say how sure is sure"
    for _ in range(30):
        memory.learn(1, torch.zeros(1, dtype=torch.bool), torch.tensor([0.2]))
    assert memory.alpha(1) < 0.2 and memory.threshold(1) == pytest.approx(0.5, abs=0.01)


def test_the_threshold_follows_the_matchness() -> None:
    """Up while guesses are rejected, down while drafts end early though all is accepted, still while they are full."""
    start = Matchness(0.8)
    rejected = start.after(0, 4, 8)
    assert (rejected.rate, rejected.threshold) == (pytest.approx(0.45), pytest.approx(0.801))
    early = start.after(4, 4, 8)
    assert (early.rate, early.threshold) == (pytest.approx(0.95), pytest.approx(0.799))
    assert start.after(8, 8, 8).threshold == 0.8
    assert Matchness(1.0, 0.1).after(0, 1, 1).threshold == 1.0


def test_layers_to_skip_can_be_written_as_text() -> None:
    assert DraftVerifyOptions(skip_attention="1,3", skip_mlp=(2,)).route(5) == DraftVerifyOptions((1, 3), "2").route(5)
    assert not DraftVerifyOptions().route(6).attention[3] and all(DraftVerifyOptions().route(6).mlp)
