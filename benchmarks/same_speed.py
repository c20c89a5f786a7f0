"""The same work through every way in: ``generate``, ``bench`` and ``tune``, and the server report the same tokens per second.

    PYTHONPATH=src python benchmarks/same_speed.py [--tokens 96] [--turns 5] [--device cuda] [--out FILE]

One prompt of the bundled pair is continued greedily, by plain decoding and by a draft model with four guesses. The ways take
turns in one process. Reported is the speed that each of them tells its user: the best of its turns, and its ratio to that of
``generate``. ``bench`` and ``tune`` measure by the same function. The server answers in process, without a socket; it is left
out where FastAPI is missing. The machine must be quiet for these. Processor time of the whole call, prompt included, may be
compared on a busy one: the least of the turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.bench.decode import decode
from outrider.bench.provenance import keep_results

PROMPT = "Once upon a time, there was a little fox who lived in a forest. One day, the fox"
METHODS: dict[str, dict[str, Any]] = {"plain": {}, "draft-model": {"num_draft_tokens": 4, "policy": "fixed"}}
Speed = Callable[[], float]


def by_generate(llm: LLM, params: SamplingParams) -> float:
    return llm.generate(PROMPT, params)[0].stats.tokens_per_second


def by_bench(llm: LLM, params: SamplingParams) -> float:
    done = decode(llm, llm.method, [llm.codec.encode(PROMPT)], [params])
    return sum(map(len, done.outputs)) / done.seconds


@contextmanager
def server_of(llm: LLM, params: SamplingParams) -> Iterator[Speed | None]:
    """What a request to the server is told about itself."""
    try:
        import httpx

        from outrider.server.app import create_app
        from outrider.server.service import Service
        from outrider.server.settings import ServerSettings
    except ImportError:
        yield None
        return
    service = Service(llm, ServerSettings(prefix_bytes=0))
    service.worker.start()
    asked = {"prompt": PROMPT, "max_tokens": params.max_tokens, "temperature": 0, "ignore_eos": True}

    async def ask() -> float:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
            answer = await client.post("/v1/completions", json=asked)
        return answer.json()["speculation"]["tokens_per_second"]

    try:
        yield lambda: asyncio.run(ask())
    finally:
        service.close()


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(method=name, device=arguments.device, **METHODS[name])
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    with server_of(llm, params) as by_server:
        ways: dict[str, Speed | None] = {
            "generate": lambda: by_generate(llm, params),
            "bench, tune": lambda: by_bench(llm, params),
            "serve": by_server,
        }
        found = {way: list[tuple[float, float]]() for way, speed in ways.items() if speed is not None}
        for turn in range(arguments.turns + 1):
            for way, speed in ways.items():
                if speed is not None:
                    began, told = time.process_time(), speed()
                    found[way] += [(told, time.process_time() - began)] if turn else []  # the first turn warms up
    best = {way: max(told for told, _ in turns) for way, turns in found.items()}
    least = {way: min(taken for _, taken in turns) for way, turns in found.items()}
    row: dict[str, Any] = {"method": name}
    for way, speed in best.items():
        row |= {f"{way}, tokens per second": speed, f"{way}, processor milliseconds": 1e3 * least[way]}
        if way != "generate":
            row |= {f"{way} / generate": speed / best["generate"]}
            row |= {f"{way} / generate, processor time": least[way] / least["generate"]}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [measure(name, arguments) for name in METHODS]
    what = (
        f"one prompt of the bundled pair, {arguments.tokens} tokens, batch 1: the best of {arguments.turns} turns of each way"
    )
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/same_speed.py")))


if __name__ == "__main__":
    main()
