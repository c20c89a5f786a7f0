"""Caches of continuous tokens: scores and images are those of a model that reads the whole prefix anew in every pass."""

from __future__ import annotations

from typing import final

import pytest
import torch
from tiers import in_turn
from torch import Tensor

from outrider.cache.contiguous import ContiguousCache
from outrider.core.interfaces import Cache
from outrider.core.request import Origin
from outrider.images.continuous.decode import ContinuousSettings, PathWriter, write_plain
from outrider.images.continuous.interfaces import ContinuousTarget
from outrider.images.continuous.model import ContinuousShape, DiffusionModel, Network
from outrider.images.continuous.paths import Chain, Schedule
from outrider.images.continuous.rules import JointPath, LastStep, PathRule, Published, Reflect

pytestmark = pytest.mark.usefixtures("one_thread")


def network_of(width: int, seed: int) -> Network:
    torch.manual_seed(seed)
    shape = ContinuousShape(num_tokens=9, dim=4, num_classes=3, width=width, num_layers=2, num_heads=2, head_width=16)
    return Network(shape).double()


def models_of(schedule: Schedule) -> tuple[DiffusionModel, DiffusionModel]:
    """A target, and a draft near it: the target's own weights with a little noise."""
    target, draft = network_of(24, 1), network_of(24, 1)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=chance, dtype=torch.float64))
    return DiffusionModel(target, schedule), DiffusionModel(draft, schedule)


@final
class Recomputing(ContinuousTarget):
    """A model that keeps tokens and reads all of them anew in every pass."""

    def __init__(self, model: DiffusionModel) -> None:
        self.model, self.schedule, self.dtype = model, model.schedule, model.dtype
        self.num_tokens, self.dim, self.num_classes = model.num_tokens, model.dim, model.num_classes

    def new_cache(self, batch_size: int) -> ContiguousCache:
        return ContiguousCache.empty(1, (batch_size, 1, self.dim), dtype=self.dtype, device=torch.device("cpu"))

    def score(self, nodes: Tensor, labels: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, ContiguousCache)
        cache.reserve(nodes.shape[1])
        tokens = cache.write(0, nodes[:, None], nodes[:, None])[0][:, 0, 1 : self.num_tokens]
        places = torch.tensor(cache.lengths)[:, None] + torch.arange(nodes.shape[1])
        found = self.model.conditions(tokens, labels)
        return found[torch.arange(len(nodes))[:, None], places.clamp(max=found.shape[1] - 1)]

    def chain(self, conditions: Tensor) -> Chain:
        return self.model.chain(conditions)


def test_scores_on_a_cache_are_those_of_the_whole_prefix() -> None:
    """After any commits and truncations, rows of different lengths; the guesses are rejected at random places."""
    model, _ = models_of(Schedule(12))
    chance, labels = torch.Generator().manual_seed(0), torch.tensor([0, 2, 1])
    tokens = torch.randn(3, 10, 4, generator=chance, dtype=torch.float64)
    cache = model.new_cache(3)
    for round_number in range(12):
        nodes = torch.randn(3, 3, 4, generator=chance, dtype=torch.float64)
        count = [min(n, 9 - length) for n, length in zip((1, round_number % 3, 3), cache.lengths, strict=True)]
        for row, (length, most) in enumerate(zip(cache.lengths, count, strict=True)):
            nodes[row, :most] = tokens[row, length : length + most]
        found = model.score(nodes, labels, cache)
        expected = model.conditions(tokens[:, 1:9], labels)
        for row, (length, most) in enumerate(zip(cache.lengths, count, strict=True)):
            torch.testing.assert_close(found[row, :most], expected[row, length : length + most], rtol=0, atol=1e-12)
        cache.commit([range(n) for n in count])
        if round_number % 4 == 3:
            cache.truncate([length // 2 for length in cache.lengths])


@pytest.mark.parametrize(
    ("rule", "settings"),
    in_turn(
        (JointPath(), Reflect(), LastStep(), Published(temperature=3.0)),
        (ContinuousSettings(3), ContinuousSettings(5, prefill=0.3)),
    ),
)
def test_images_are_those_of_a_writer_without_caches(rule: PathRule, settings: ContinuousSettings) -> None:
    """Token by token in float64, with the passes that wrote them; rows go their own pace and leave when they are done."""
    models, labels = models_of(Schedule(5, last_width=0.3)), torch.tensor([0, 1, 2, 1, 0, 2])
    runs = [
        PathWriter(target, draft, rule, settings).write(labels, torch.Generator().manual_seed(4))
        for target, draft in (models, map(Recomputing, models))
    ]
    torch.testing.assert_close(runs[0].tokens, runs[1].tokens, rtol=0, atol=1e-12)
    assert [row.rounds for row in runs[0].rows] == [row.rounds for row in runs[1].rows]
    passes = {row.stats.num_passes for row in runs[0].rows}
    assert len(passes) > 1 and max(passes) < 9, "rows accept different numbers of guesses"


def test_plain_images_are_those_of_the_oracle() -> None:
    model, _ = models_of(Schedule(5))
    labels = torch.tensor([2, 0])
    found = PathWriter(model).write(labels, torch.Generator().manual_seed(4))
    torch.testing.assert_close(found.tokens, write_plain(model, labels, torch.Generator().manual_seed(4)), rtol=0, atol=1e-12)
    assert all(row.origins == [Origin.BONUS] * 9 and row.num_paths == 9 for row in found.rows)
