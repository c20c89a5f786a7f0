"""Throughput of `outrider serve` on loopback at 1, 8 and 32 clients, speculation auto against off, in turns.

    python benchmarks/serving_load.py [--address http://127.0.0.1:8000] [--repeats 5] [--tokens 96]

Without an address a server with the bundled pair is started. Both sides are requests to the same server, so nothing but the
field `speculation` differs; the median over repeats of tokens per second and of the ratio of neighbouring runs is printed.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

_PROMPTS = (
    "Once upon a time",
    "One day, a little girl",
    "Tom and his dog",
    "There was a big red",
    "The old man",
    "Lily liked to",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.address:
        measure(arguments.address, arguments)
        return
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"at (http://\S+:\d+)/", server.stdout.readline())
        assert found is not None, "the server did not start"
        measure(found[1], arguments)
    finally:
        server.terminate()
        server.wait()


def measure(address: str, arguments: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    for count in arguments.clients:
        speeds: dict[str, list[float]] = {"off": [], "auto": []}
        for repeat in range(arguments.repeats + 1):
            for mode in ("off", "auto") if repeat % 2 else ("auto", "off"):
                speed = run(address, mode, count, arguments)
                if repeat:  # the first of each warms up
                    speeds[mode].append(speed)
        ratios = [a / o for a, o in zip(speeds["auto"], speeds["off"], strict=True)]
        row = {mode: statistics.median(values) for mode, values in speeds.items()}
        results[str(count)] = {**row, "ratio": statistics.median(ratios), "ratios": ratios}
        ratio = results[str(count)]["ratio"]
        print(f"{count:>3} clients: off {row['off']:7.1f} tokens/s, auto {row['auto']:7.1f}, ratio {ratio:.2f}", flush=True)
    print(json.dumps(results))


def run(address: str, mode: str, count: int, arguments: argparse.Namespace) -> float:
    """Tokens per second of ``count`` clients that each send two requests in a row."""

    def client(number: int) -> int:
        tokens = 0
        with httpx.Client(base_url=address, timeout=300) as http:
            for turn in range(2):
                body = {"prompt": _PROMPTS[(number + turn) % len(_PROMPTS)], "max_tokens": arguments.tokens, "seed": number}
                body |= {"temperature": arguments.temperature, "speculation": mode, "ignore_eos": True}
                answer = http.post("/v1/completions", json=body)
                answer.raise_for_status()
                tokens += answer.json()["usage"]["completion_tokens"]
        return tokens

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        total = sum(pool.map(client, range(count)))
    return total / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
