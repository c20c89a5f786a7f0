"""Mixed requests through every lossless method that can run, with too little memory, each compared with its solo run.

    python scripts/identity_run.py [--requests 2000] [--minutes 30] [--clients 24] [--memory-budget BYTES] [--processes 1]
        [--out FILE]

Two servers share the bundled models in this process. One has a memory budget so small that requests are sent back to wait. It
gets requests with random prompts, parameters and methods from several clients. The other one gets the same requests one by
one, decoded without guesses. Answers must have the same text, the same end and the same log-probability tokens. Methods that
keep the distribution, but not the sample of a seed, are asked at temperature 0. Several ``--processes`` have two servers each
and share the requests among them. The last line is JSON. The exit code is 1 if an answer differs, or if nothing was preempted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from outrider import LLM
from outrider.bench.provenance import keep_results
from outrider.bench.suites import BEGINNINGS
from outrider.core.interfaces import AcceptanceRule
from outrider.methods import METHODS, RULES
from outrider.server.app import create_app
from outrider.server.service import Service
from outrider.server.settings import ServerSettings

WORDS = "cat dog tree house ball sun rain bird friend mother boat garden apple story happy small red ran said".split()


def body(rng: random.Random) -> dict[str, Any]:
    """A request with random parameters; everything but the method."""
    words = rng.choices(WORDS, k=rng.choice([0, 3, 10, 40, 145]))
    asked: dict[str, Any] = {
        "prompt": " ".join([rng.choice(BEGINNINGS), *words]),
        "max_tokens": rng.randint(1, 32),
        "temperature": rng.choice([0, 0.7, 1, 1.3]),
        "top_p": rng.choice([1, 0.9]),
        "top_k": rng.choice([0, 0, 20]),
        "min_p": rng.choice([0, 0, 0.05]),
        "frequency_penalty": rng.choice([0, 0, 0.5]),
        "repetition_penalty": rng.choice([1, 1, 1.2]),
        "seed": rng.randrange(1 << 40),
        "logprobs": rng.choice([None, None, 2]),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.2:
        asked["stop"] = [rng.choice([".", " the", "!"])]
    if rng.random() < 0.1:
        asked["n"] = 2
    if rng.random() < 0.1:
        asked["logit_bias"] = {"5": -3.0, "40": 2.0}
    return asked


def how(rng: random.Random, methods: list[str]) -> dict[str, Any]:
    """A method, sometimes with a limit or a fixed length."""
    wanted: dict[str, Any] = {"method": rng.choice(methods)}
    limit = rng.choice([{}, {}, {"max_tokens": 2}, {"num_draft_tokens": 3}])
    return {**wanted, **limit}


def rule_of(method: str) -> type[AcceptanceRule]:
    return RULES[METHODS[method].acceptance].rule


def shown(answer: dict[str, Any]) -> list[Any]:
    """The parts of an answer that must be equal."""
    return [
        (choice["text"], choice["finish_reason"], choice["logprobs"] and choice["logprobs"]["tokens"])
        for choice in answer["choices"]
    ]


class Run:
    """A run: its requests and their outcomes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        llm = LLM(page_len=arguments.page_len)
        self.methods = [name for name in METHODS if llm.can_compose(name) and rule_of(name).lossless]
        self.crowded = Service(llm, ServerSettings(memory_budget=arguments.memory_budget, max_rows=16, prefix_bytes=2_000_000))
        self.quiet = Service(llm, ServerSettings(prefix_bytes=0))
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.counts: Counter[str] = Counter()
        self.by_method: Counter[str] = Counter()
        self.different: list[dict[str, Any]] = []
        self.answers: list[tuple[dict[str, Any], str, list[Any]]] = []

    async def ask(self, client: Any, asked: dict[str, Any]) -> Any:
        answer = await client.post("/v1/completions", json=asked)
        return answer.json() if answer.status_code == 200 else answer.text

    async def crowd(self, client: Any, numbers: list[int]) -> None:
        while numbers and time.monotonic() < self.deadline:
            rng = random.Random(self.arguments.seed * 1_000_003 + numbers.pop())
            asked, wanted = body(rng), how(rng, self.methods)
            asked |= {} if rule_of(wanted["method"]).keeps_seed else {"temperature": 0}
            answer = await self.ask(client, {**asked, "speculation": wanted})
            if isinstance(answer, str):
                self.counts["refused"] += 1
                print(f"refused: {answer}", file=sys.stderr)
                continue
            self.answers.append((asked, wanted["method"], shown(answer)))
            if len(self.answers) % 100 == 0:
                print(f"{len(self.answers)} answered", file=sys.stderr, flush=True)

    async def compare(self, client: Any) -> None:
        for asked, method, found in self.answers:
            alone = await self.ask(client, {**asked, "speculation": "off"})
            is_same = not isinstance(alone, str) and shown(alone) == found
            self.counts["equal" if is_same else "different"] += 1
            self.by_method[method] += is_same
            if not is_same:
                self.different.append({"asked": asked, "method": method, "found": found, "alone": alone})

    async def run(self) -> dict[str, Any]:
        self.crowded.worker.start()
        self.quiet.worker.start()
        numbers = list(range(self.arguments.part or 0, self.arguments.requests, self.arguments.processes))
        try:
            async with _client(self.crowded) as client:
                await asyncio.gather(*(self.crowd(client, numbers) for _ in range(self.arguments.clients)))
            num_preempted = self.crowded.worker.scheduler.num_preempted
            async with _client(self.quiet) as client:
                await self.compare(client)
        finally:
            self.crowded.close()
            self.quiet.close()
        return self.told(num_preempted)

    def told(self, num_preempted: int) -> dict[str, Any]:
        for case in self.different[:5]:
            print(f"different: {json.dumps(case)}", file=sys.stderr)
        told = {"requests": self.counts.total(), **{name: self.counts[name] for name in ("equal", "different", "refused")}}
        told |= {"preempted": num_preempted, "engine_failures": self.crowded.worker.num_failures}
        return {**told, "methods": dict(self.by_method)}


def _client(service: Service) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600)


def all_parts(num_processes: int) -> dict[str, Any]:
    """What several processes found, each with its part of the requests."""
    commands = [[sys.executable, *sys.argv, "--part", str(part)] for part in range(num_processes)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    return added([json.loads(process.communicate()[0].splitlines()[-1]) for process in running])


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several results as one."""
    methods = sum((Counter[str](part["methods"]) for part in parts), Counter[str]())
    counts = {name: sum(part[name] for part in parts) for name in parts[0] if name != "methods"}
    return {**counts, "methods": dict(sorted(methods.items()))}


def is_well(told: dict[str, Any]) -> bool:
    return told["preempted"] > 0 and not any(told[name] for name in ("different", "refused", "engine_failures"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=30, help="no new requests after so long; the comparison goes on")
    parser.add_argument("--clients", type=int, default=24, help="of each process")
    parser.add_argument("--memory-budget", type=int, default=24_000_000)
    parser.add_argument("--page-len", type=int, default=0, help="keep keys and values in pages of so many tokens")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result")
    arguments = parser.parse_args()
    if arguments.part is None and arguments.processes > 1:
        told = all_parts(arguments.processes)
    else:
        told = added([asyncio.run(Run(arguments).run())])
    if arguments.part is None:
        what = "mixed requests against their solo runs"
        print(json.dumps(keep_results(arguments.out, what, [told], script="scripts/identity_run.py")))
    else:
        print(json.dumps(told))
    return 0 if is_well(told) else 1


if __name__ == "__main__":
    sys.exit(main())
