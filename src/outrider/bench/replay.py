"""Simulates requests that arrive at a fleet, and reports how long they wait. The capacity model only divides.

A trace of arrivals is read from a public file, or made from published statistics. In a made one, gaps between arrivals are
gamma distributed, with a coefficient of variation for how bursty they are (BurstGPT, Wang et al. 2024, arXiv 2401.17644; 1 is
Poisson). Lengths are log-normal around the medians of two services (Splitwise, Patel et al. 2024, arXiv 2311.18677). How far
lengths spread is an assumption.

A replica reads prompts one after the other, first come, first served. While it reads, its rows wait. Otherwise its rows share
its speed equally.

    gap ~ Gamma(1 / cv^2, cv^2 / rate),       length = median exp(sigma z),       a row's speed = speed(rows) / rows
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from os import PathLike
from typing import final

_LONGEST = 8192


@dataclass(frozen=True)
class Workload:
    """Distribution of the lengths of a service's requests."""

    name: str
    prompt_median: float
    output_median: float
    sigma: float = 1.0
    """Standard deviation of a length's logarithm; an assumption."""

    @property
    def prompt_tokens(self) -> float:
        """Expected prompt tokens, ignoring the limit on the longest."""
        return self.prompt_median * math.exp(self.sigma**2 / 2)

    @property
    def output_tokens(self) -> float:
        return self.output_median * math.exp(self.sigma**2 / 2)


WORKLOADS = {"conversation": Workload("conversation", 1020, 129), "coding": Workload("coding", 1500, 13)}
"""Median lengths of Splitwise's two services."""


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    at: float
    prompt_tokens: float
    output_tokens: float


def make_trace(workload: Workload, *, rate: float, seconds: float, cv: float, seed: int = 0) -> list[Arrival]:
    """Requests that arrive within ``seconds``, ``rate`` of them a second."""
    rng, now, found = random.Random(seed), 0.0, list[Arrival]()

    def length(median: float) -> float:
        return min(max(1.0, round(median * math.exp(workload.sigma * rng.gauss(0, 1)))), _LONGEST)

    while (now := now + rng.gammavariate(1 / cv**2, cv**2 / rate)) < seconds:
        found.append(Arrival(now, length(workload.prompt_median), length(workload.output_median)))
    return found


def read_trace(path: str | PathLike[str], *, rate: float) -> list[Arrival]:
    """Requests of a file with the columns TIMESTAMP, ContextTokens and GeneratedTokens, as Azure's traces of language models
    have them (github.com/Azure/AzurePublicDataset). Time is compressed or stretched so that ``rate`` arrive a second."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = sorted(
            (datetime.fromisoformat(row["TIMESTAMP"][:26]), float(row["ContextTokens"]), float(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        )
    since = [(at - rows[0][0]).total_seconds() for at, _, _ in rows]
    pace = len(rows) / (rate * since[-1])
    return [Arrival(at * pace, prompt, output) for at, (_, prompt, output) in zip(since, rows, strict=True)]


@dataclass(frozen=True)
class Speeds:
    """Speeds of a replica."""

    tokens: Callable[[int], float]
    """Tokens per second of all rows together, by the number of rows."""
    prompt: float
    """Prompt tokens per second while nothing else runs."""
    max_rows: int


@final
@dataclass(eq=False)
class SimulatedReplica:
    """The state of one replica at a moment."""

    speeds: Speeds
    now: float = 0.0
    busy: float = 0.0
    waits: list[float] = field(default_factory=list)
    """Seconds from arrival until the prompt began to be read, per request."""
    firsts: list[float] = field(default_factory=list)
    """Seconds from arrival until the prompt was read, per request."""
    totals: list[float] = field(default_factory=list)
    """Seconds from arrival until the last token, per request."""
    _queue: deque[Arrival] = field(default_factory=deque)
    _reading: tuple[float, Arrival] | None = None
    """When the present prompt is read, and which request it belongs to."""
    _rows: list[tuple[float, float]] = field(default_factory=list)
    """A heap of rows: the share of tokens at which a row ends, and when it arrived."""
    _share: float = 0.0
    """Tokens written by a row that was there from the beginning."""

    @property
    def num_requests(self) -> int:
        return len(self._queue) + len(self._rows) + (self._reading is not None)

    def add(self, arrival: Arrival) -> None:
        """Add an arriving request. The time must have been advanced to its arrival."""
        self._queue.append(arrival)

    def advance(self, until: float) -> None:
        """Let time pass."""
        while self.now < until:
            if self._reading is None and self._queue and len(self._rows) < self.speeds.max_rows:
                arrival = self._queue.popleft()
                self.waits.append(self.now - arrival.at)
                self._reading = self.now + arrival.prompt_tokens / self.speeds.prompt, arrival
            if self._reading is not None:
                self._read(until)
            elif self._rows:
                self._decode(until)
            else:
                self.now = until

    def _read(self, until: float) -> None:
        assert self._reading is not None
        end, arrival = self._reading
        self._pass(min(end, until))
        if end <= until:
            self.firsts.append(end - arrival.at)
            heapq.heappush(self._rows, (self._share + arrival.output_tokens, arrival.at))
            self._reading = None

    def _decode(self, until: float) -> None:
        speed = self.speeds.tokens(len(self._rows)) / len(self._rows)
        end = self.now + max(self._rows[0][0] - self._share, 0.0) / speed
        stop = min(end, until)
        self._share += (stop - self.now) * speed
        self._pass(stop)
        if end <= until:
            self._share, at = heapq.heappop(self._rows)
            self.totals.append(end - at)

    def _pass(self, until: float) -> None:
        self.busy += until - self.now
        self.now = until


@dataclass(frozen=True)
class ReplayOutcome:
    """Result of replaying a trace on a fleet."""

    num_replicas: int
    wait_p50: float
    wait_p99: float
    first_p99: float
    total_p50: float
    total_p99: float
    utilisation: float
    """Share of the time in which a replica was busy."""


def replay(trace: Sequence[Arrival], speeds: Speeds, num_replicas: int) -> ReplayOutcome:
    """Replay a trace. Every request goes to the replica with the fewest requests, and all are answered."""
    replicas = [SimulatedReplica(speeds) for _ in range(num_replicas)]
    for arrival in trace:
        for replica in replicas:
            replica.advance(arrival.at)
        min(replicas, key=lambda one: one.num_requests).add(arrival)
    span = trace[-1].at
    busy = sum(replica.busy for replica in replicas)
    for replica in replicas:
        while replica.num_requests:
            replica.advance(replica.now + 60.0)
    waits, firsts, totals = (
        sorted(value for replica in replicas for value in many(replica))
        for many in (lambda one: one.waits, lambda one: one.firsts, lambda one: one.totals)
    )
    assert len(totals) == len(trace), "every request is answered"
    return ReplayOutcome(
        num_replicas,
        _quantile(waits, 0.5),
        _quantile(waits, 0.99),
        _quantile(firsts, 0.99),
        _quantile(totals, 0.5),
        _quantile(totals, 0.99),
        busy / (span * num_replicas),
    )


def fewest(trace: Sequence[Arrival], speeds: Speeds, *, wait_p99: float, most: int = 200) -> ReplayOutcome:
    """The smallest fleet in which 99 of 100 requests wait no longer than ``wait_p99``, found by bisection."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if replay(trace, speeds, middle).wait_p99 <= wait_p99:
            high = middle
        else:
            low = middle + 1
    return replay(trace, speeds, low)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
