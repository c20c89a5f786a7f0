"""Throughput of `outrider serve` on loopback at 1, 8 and 32 clients: speculation off, of a fixed length and auto, in turns.

    python benchmarks/serving_load.py [--seconds 1.5] [--repeats 5] [--temperature 0 1] [--clients 1 8 32] [--fixed 3]
                                      [--beginnings 60] [--json build/serving_load.json]

There are two servers with the bundled pair. One speculates as it likes (`off` and `auto` are requests to the same one, nothing
but the field `speculation` differs), and one has a fixed length. Each of N clients sends its next request when the last is
answered. Prompts and lengths (32 to 96 tokens) are drawn, the same for every mode. Tokens are counted in a window in which all
clients are busy; of a request that was under way when it began or ended, the part that fell into it. Answers are streamed. The
time between two events of an answer is a gap, which the prompt of another request makes longer. Printed: medians of tokens per
second, ratios of neighbouring runs with the 95 % interval of their mean, and the 99th percentile of all gaps. ``--beginnings``
joins so many beginnings to a prompt (five tokens each).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from outrider.bench.provenance import keep_results
from outrider.bench.stats import Estimate, pooled
from outrider.bench.suites import BEGINNINGS

_RAMP_S = 0.4
"""Time until all clients are in the middle of something."""
_MODES = ("off", "fixed", "auto")
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
WHAT = "clients that stream answers of 32 to 96 tokens from `outrider serve`, bundled pair, medians by mode"


class Load(NamedTuple):
    """What a window showed."""

    speed: float
    gaps: list[float]
    """Seconds between the events of answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--fixed", type=int, default=3, help="length of the fixed mode")
    parser.add_argument("--beginnings", type=int, default=1, help="beginnings of stories in a prompt")
    parser.add_argument("--json", type=Path, help="where the table goes")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        auto, fixed = (stack.enter_context(Served(*flags)) for flags in ((), ("-K", str(arguments.fixed))))
        addresses = {"off": auto.address, "fixed": fixed.address, "auto": auto.address}
        results = [
            measure(addresses, count, temperature, arguments)
            for temperature in arguments.temperature
            for count in arguments.clients
        ]
    document = keep_results(arguments.json, WHAT, results, script="benchmarks/serving_load.py")
    print(json.dumps(document["rows"]))


class Served:
    """A server in a process of its own."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--log-level", "warning", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = re.search(r"at (http://\S+:\d+)/", self._process.stdout.readline())
        assert found is not None, "the server did not start"
        self.address = found[1]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def measure(addresses: dict[str, str], count: int, temperature: float, arguments: argparse.Namespace) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {mode: [] for mode in _MODES}
    gaps: dict[str, list[float]] = {mode: [] for mode in _MODES}
    for repeat in range(arguments.repeats + 1):
        for mode in _MODES if repeat % 2 else _MODES[::-1]:
            load = asyncio.run(run(addresses[mode], mode, count, temperature, arguments))
            if repeat:  # the first of each warms up
                speeds[mode].append(load.speed)
                gaps[mode] += load.gaps
    ratios = {mode: _ratio(speeds[mode], speeds["off"]) for mode in _MODES[1:]}
    row: dict[str, Any] = {"clients": count, "temperature": temperature, "beginnings": arguments.beginnings}
    for mode in _MODES:
        row[f"{mode}, tokens/s"] = round(statistics.median(speeds[mode]), 1)
        row[f"{mode}, p99 gap (ms)"] = round(1e3 * statistics.quantiles(gaps[mode], n=100)[98], 1)
        row[f"{mode}, median gap (ms)"] = round(1e3 * statistics.median(gaps[mode]), 1)
    row |= {f"{mode} / off": f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})" for mode, found in ratios.items()}
    print(", ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    return row


def _ratio(speeds: list[float], base: list[float]) -> Estimate:
    return pooled([Estimate(a / b, a / b, a / b, 1) for a, b in zip(speeds, base, strict=True)])


async def run(address: str, mode: str, count: int, temperature: float, arguments: argparse.Namespace) -> Load:
    """What ``count`` clients get, all of them busy."""
    rng = random.Random(count)
    served: list[tuple[float, list[float], int]] = []
    """When each request was sent, when each event of its answer came, and its tokens."""
    is_over = False
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)

    async def client(http: httpx.AsyncClient) -> None:
        while not is_over:
            prompt = ". ".join(rng.choice(BEGINNINGS) for _ in range(arguments.beginnings))
            body = {"prompt": prompt, "max_tokens": rng.randint(32, 96), "seed": rng.randrange(1000), "ignore_eos": True}
            body |= {"temperature": temperature, "speculation": "off" if mode == "off" else "auto"}
            sent = time.perf_counter()
            served.append((sent, *await streamed(http, body)))

    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as http:
        tasks = [asyncio.ensure_future(client(http)) for _ in range(count)]
        await asyncio.sleep(_RAMP_S)
        began = time.perf_counter()
        await asyncio.sleep(arguments.seconds)
        ended, is_over = time.perf_counter(), True
        await asyncio.gather(*tasks)
    inside = (
        tokens * max(min(times[-1], ended) - max(sent, began), 0.0) / (times[-1] - sent) for sent, times, tokens in served
    )
    pairs = [pair for _, times, _ in served for pair in pairwise(times)]
    return Load(sum(inside) / (ended - began), [late - early for early, late in pairs if began <= early and late <= ended])


async def streamed(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[float], int]:
    """When each event of an answer came, and its tokens."""
    times, tokens = list[float](), 0
    async with http.stream("POST", "/v1/completions", json=body | _STREAMED) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage")
                tokens = usage["completion_tokens"] if usage else tokens
                if not usage:
                    times.append(time.perf_counter())
    return times, tokens


if __name__ == "__main__":
    main()
