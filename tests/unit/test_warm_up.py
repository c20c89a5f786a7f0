"""After a warm-up nothing is captured and no kernel is compiled: not when a drafter catches up, not for prompts of other
lengths, whole or in pieces, and not when the policy stops and starts."""

from __future__ import annotations

import random

import pytest
from triton_interpreter import DEVICE

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Observation, Plan, Policy, Stateless
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import Scheduler
from outrider.methods import compose
from outrider.models.attention.tree_tiles import Rows
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.pages import flat_rows, rows_in
from outrider.models.gpu.wide_tiles import telling_rows, wide_tile
from outrider.models.random_decoder import tiny_config, tiny_weights

if DEVICE.type == "cuda":
    pytest.skip("the device is played on a CPU", allow_module_level=True)

from played_device import lane_of, play

from outrider.cuda_graphs import Rounds, captured

CONFIG = tiny_config(num_hidden_layers=1)


class Turns(Policy):
    """Plans lengths in turn: it stops, and starts again."""

    def __init__(self, *lengths: int) -> None:
        self._lengths, self._count = lengths, 0

    def start(self, num_rows: int) -> Stateless:
        del num_rows
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        del state
        self._count += 1
        length = self._lengths[self._count % len(self._lengths)]
        return Plan((length,) * num_rows, (length,) * num_rows)

    def update(self, state: Stateless, observation: Observation) -> None:
        del state, observation

    def captured_shape(self) -> CapturedShape:
        return CapturedShape({1: 1, 2: 2})


def fast(seed: int) -> FastDecoder:
    model = FastDecoder(CONFIG, tiny_weights(CONFIG, seed=seed), numerics="invariant")
    model.pool.hold(128)
    return model


def test_a_session_compiles_and_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, made = fast(0), fast(1), play(monkeypatch)
    parts = compose("draft-model", target, draft=draft, policy="fixed")
    method = Method(parts.drafter, parts.rule, Turns(0, 2, 0, 0, 1, 0, 0, 0))
    graphs, rounds, rng = captured(method, target), Rounds(target), random.Random(0)
    assert graphs is not None
    monkeypatch.setattr(rounds, "graphs_of", lambda _: graphs)
    assert len(list(rounds.prepare(method, (1, 2)))) >= 2 * 3 and made.graphs
    scheduler = Scheduler(target, lambda _: method, slots=Slots(2, 64), device_lane=lane_of(graphs))
    states = [
        RequestState.of(Request([rng.randrange(64) for _ in range(size)], SamplingParams(max_tokens=9, seed=1)))
        for size in (3, 40, 20)
    ]
    with made.nothing_new():
        for number, state in enumerate(states):
            scheduler.submit(Job(number, state))
            scheduler.round()
        while not scheduler.is_idle:
            scheduler.round()
    assert all(state.num_output == 9 for state in states)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5])
def test_pages_begin_at_addresses_that_kernels_are_compiled_for(batch_size: int) -> None:
    model = fast(0)
    cache = model.new_cache(batch_size)
    cache.reserve(100)
    rows: Rows = rows_in(flat_rows(cache, 3), batch_size, model.page_len)
    assert rows.places.data_ptr() % 16 == 0 and rows.places[:, :2].tolist() == [row[:2] for row in cache.pages]
    assert rows.lengths.tolist() == [0] * batch_size


@pytest.mark.parametrize(("outputs", "parts", "gated"), [(6144, 2, False), (14336, 1, True), (96, 2, False)])
def test_a_few_numbers_of_rows_have_every_tile(outputs: int, parts: int, gated: bool) -> None:
    told = {wide_tile(rows, outputs, parts, gated=gated) for rows in telling_rows(outputs, parts, gated=gated, most=512)}
    assert told == {wide_tile(rows, outputs, parts, gated=gated) for rows in range(65, 513)}
