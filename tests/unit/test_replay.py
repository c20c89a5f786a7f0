"""The replay of arrivals against queueing theory, and the capacity model against the replay."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from outrider.bench.capacity import Capacity
from outrider.bench.replay import WORKLOADS, Arrival, SimulatedReplica, Speeds, fewest, make_trace, read_trace, replay


def test_a_trace_has_the_rate_the_burstiness_and_the_medians() -> None:
    for cv in (1.0, 3.0):
        trace = make_trace(WORKLOADS["conversation"], rate=50, seconds=400, cv=cv, seed=1)
        gaps = [second.at - first.at for first, second in pairwise(trace)]
        assert len(trace) / 400 == pytest.approx(50, rel=0.06)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)
        assert statistics.median(one.output_tokens for one in trace) == pytest.approx(129, rel=0.05)
        assert statistics.median(one.prompt_tokens for one in trace) == pytest.approx(1020, rel=0.05)


def test_a_public_trace_keeps_its_shape_at_another_rate(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:50.9951690,396,109", "2023-11-16 18:15:46.9951690,374,44", "2023-11-16 18:15:54.9951699,20,7"]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    trace = read_trace(path, rate=3.0)
    assert [one.at for one in trace] == pytest.approx([0.0, 0.5, 1.0])
    assert [(one.prompt_tokens, one.output_tokens) for one in trace] == [(374, 44), (396, 109), (20, 7)]


def exponential(rate: float, count: int, mean: float) -> list[Arrival]:
    rng, now, found = random.Random(3), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        found.append(Arrival(now, 1e-9, rng.expovariate(1 / mean)))
    return found


def test_rows_that_share_a_replica_are_an_m_m_1_queue_with_processor_sharing() -> None:
    """Mean time in the system is 1 / (mu - lambda), whatever the number of rows."""
    told = replay(exponential(7.0, 20_000, 1.0), Speeds(lambda _: 10.0, 1e12, 10_000), 1)
    assert told.utilisation == pytest.approx(0.7, abs=0.02)
    replica = SimulatedReplica(Speeds(lambda _: 10.0, 1e12, 10_000))
    for arrival in exponential(7.0, 20_000, 1.0):
        replica.advance(arrival.at)
        replica.add(arrival)
    replica.advance(1e5)
    assert statistics.mean(replica.totals) == pytest.approx(1 / (10 - 7), rel=0.12)
    assert told.wait_p99 == pytest.approx(0, abs=1e-6), "nobody waits for a row"


def test_one_row_is_an_m_m_1_queue() -> None:
    """Mean wait is rho / (mu - lambda)."""
    replica = SimulatedReplica(Speeds(lambda _: 10.0, 1e12, 1))
    for arrival in exponential(6.0, 20_000, 1.0):
        replica.advance(arrival.at)
        replica.add(arrival)
    replica.advance(1e5)
    assert statistics.mean(replica.waits) == pytest.approx(0.6 / (10 - 6), rel=0.12)


def test_reading_prompts_takes_the_rows_time() -> None:
    speeds = Speeds(lambda rows: 10.0 * rows, 100.0, 4)
    alone = replay([Arrival(1.0, 100, 20)], speeds, 1)
    assert (alone.first_p99, alone.total_p99) == (pytest.approx(1.0), pytest.approx(3.0))
    both = replay([Arrival(1.0, 100, 20), Arrival(2.5, 100, 20)], speeds, 1)
    assert both.total_p99 == pytest.approx(4.0), "the first row stood still for a second"


def test_prompts_count_in_the_capacity_model() -> None:
    without = Capacity(100, 200, utilisation=0.5)
    assert without.replicas(1000) == 40
    assert Capacity(100, 200, utilisation=0.5, prompt_tokens=1000).replicas(1000, prompt_speed=50_000) == 44
    assert without.replicas(1000, prompt_speed=50_000) == 40


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_the_planned_fleet_holds_and_one_of_half_its_size_does_not(cv: float) -> None:
    workload = WORKLOADS["conversation"]
    speeds = Speeds(lambda rows: 120.0 * rows**0.8, 60_000.0, 32)
    trace = make_trace(workload, rate=40, seconds=60, cv=cv, seed=5)
    capacity = Capacity(40, workload.output_tokens, 0.7, prompt_tokens=workload.prompt_tokens)
    planned = capacity.replicas(speeds.tokens(32), prompt_speed=speeds.prompt)
    assert replay(trace, speeds, planned).wait_p99 < 1.0
    assert replay(trace, speeds, planned // 2).wait_p99 > 1.0
    assert planned // 2 < fewest(trace, speeds, wait_p99=1.0, most=2 * planned).num_replicas <= planned
