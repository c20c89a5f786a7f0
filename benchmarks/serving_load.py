"""Throughput of `outrider serve` on loopback at 1, 8 and 32 clients: speculation off, of a fixed length and auto, in turns.

    python benchmarks/serving_load.py [--seconds 1.5] [--repeats 5] [--temperature 0 1] [--clients 1 8 32] [--fixed 3]

There are two servers with the bundled pair. One speculates as it likes (`off` and `auto` are requests to the same one, nothing
but the field `speculation` differs), and one has a fixed length. Each of N clients sends its next request when the last is
answered. Prompts and lengths (32 to 96 tokens) are drawn, the same for every mode. Tokens are counted in a window in which all
clients are busy; of a request that was under way when it began or ended, the part that fell into it. Printed: medians of tokens
per second, and ratios of neighbouring runs with the 95 % interval of their mean. The last line is JSON.
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
from typing import Any

import httpx

from outrider.bench.stats import Estimate, pooled
from outrider.bench.suites import BEGINNINGS

_RAMP_S = 0.4
"""Time until all clients are in the middle of something."""
_MODES = ("off", "fixed", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--fixed", type=int, default=3, help="length of the fixed mode")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        auto, fixed = (stack.enter_context(Served(*flags)) for flags in ((), ("-K", str(arguments.fixed))))
        addresses = {"off": auto.address, "fixed": fixed.address, "auto": auto.address}
        results = [
            measure(addresses, count, temperature, arguments)
            for temperature in arguments.temperature
            for count in arguments.clients
        ]
    print(json.dumps(results))


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
    for repeat in range(arguments.repeats + 1):
        for mode in _MODES if repeat % 2 else _MODES[::-1]:
            speed = asyncio.run(run(addresses[mode], mode, count, temperature=temperature, seconds=arguments.seconds))
            if repeat:  # the first of each warms up
                speeds[mode].append(speed)
    ratios = {mode: _ratio(speeds[mode], speeds["off"]) for mode in _MODES[1:]}
    row = {mode: statistics.median(values) for mode, values in speeds.items()}
    shown = ", ".join(f"{mode} {row[mode]:6.0f} ({r.value:.2f}, {r.low:.2f} to {r.high:.2f})" for mode, r in ratios.items())
    print(f"{count:>3} clients, temperature {temperature:g}: off {row['off']:6.0f} tokens/s, {shown}", flush=True)
    intervals = {mode: [r.value, r.low, r.high] for mode, r in ratios.items()}
    return {"clients": count, "temperature": temperature, "tokens_per_second": row, "ratios": intervals}


def _ratio(speeds: list[float], base: list[float]) -> Estimate:
    return pooled([Estimate(a / b, a / b, a / b, 1) for a, b in zip(speeds, base, strict=True)])


async def run(address: str, mode: str, count: int, *, temperature: float, seconds: float) -> float:
    """Tokens per second of ``count`` clients, all of them busy."""
    rng = random.Random(count)
    served: list[tuple[float, float, int]] = []
    """When each request was sent and answered, and its tokens."""
    is_over = False
    wanted = mode if mode == "off" else "auto"
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)

    async def client(http: httpx.AsyncClient) -> None:
        while not is_over:
            body = {"prompt": rng.choice(BEGINNINGS), "max_tokens": rng.randint(32, 96), "seed": rng.randrange(1000)}
            body |= {"temperature": temperature, "speculation": wanted, "ignore_eos": True}
            sent = time.perf_counter()
            answer = await http.post("/v1/completions", json=body)
            answer.raise_for_status()
            served.append((sent, time.perf_counter(), answer.json()["usage"]["completion_tokens"]))

    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as http:
        tasks = [asyncio.ensure_future(client(http)) for _ in range(count)]
        await asyncio.sleep(_RAMP_S)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        ended, is_over = time.perf_counter(), True
        await asyncio.gather(*tasks)
    inside = (tokens * max(min(at, ended) - max(sent, began), 0.0) / (at - sent) for sent, at, tokens in served)
    return sum(inside) / (ended - began)


if __name__ == "__main__":
    main()
