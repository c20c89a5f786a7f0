"""All hostile requests of the tests against a server of its own, each beside a bystander whose text and latency are checked.

    python scripts/hostile_run.py [--quiet 500] [--rounds 1] [--out FILE]

First the bystander is asked alone, which gives its quiet p99. Then every case of ``tests/server/hostile_cases.py`` is sent.
The bystander asks at the same moment, and again and again until the case has its answer. Each of its requests counts. Then it
is asked alone once more, as often: how many of those are too slow says what the machine does by itself. In the end the server's
memory, grammar compilers included, is compared with what it was before. Shared beginnings, compiled grammars and stored
responses have limits of their own, so their bytes are told apart and taken off. Reported are answers that are not in order,
5xx, bystanders with another text or slower than three times the quiet p99, and memory. Run it on a quiet machine: latencies are
wall time. The last line is JSON. The exit code is 1 if anything is out of bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

from hostile_cases import Case, all_cases  # pyright: ignore[reportMissingImports]

from outrider.bench.provenance import keep_results

BYSTANDER = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1, "seed": 11, "ignore_eos": True}
_SLOWER, _MORE_MEMORY = 3.0, 1.1
_IDLE_S = 5
"""Compilers of grammars end when they had no work for so long."""


@contextmanager
def served() -> Iterator[tuple[int, str]]:
    """Process number and address of a server that runs as long as somebody looks."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--log-level", "error"]
    command += ["--grammar-idle", str(_IDLE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(found[1] for line in process.stdout if (found := re.search(r"at (http://\S+:\d+)/", line)))
            yield process.pid, address
        finally:
            process.terminate()


def memory_of(pid: int) -> int:
    """Bytes that a process and its children hold."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    files = [Path(f"/proc/{one}/statm") for one in (pid, *children)]
    pages = sum(int(file.read_text().split()[1]) for file in files if file.exists())
    return pages * os.sysconf("SC_PAGE_SIZE")


class Run:
    """Observations of a run."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client, self.text = client, ""
        self.wrong, self.errors, self.changed = list[str](), list[str](), list[str]()
        self.seconds: dict[str, float] = {}
        """The slowest bystander of each case."""
        self.num_bystanders = 0

    async def bystander(self) -> tuple[float, str]:
        began = time.perf_counter()
        answer = await self.client.post("/v1/completions", json=BYSTANDER)
        return time.perf_counter() - began, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

    async def warm_up(self) -> None:
        await self.client.post("/v1/completions", json={**BYSTANDER, "guided_regex": "a"})  # loads what compiles grammars
        for _ in range(10):
            _, self.text = await self.bystander()

    async def alone(self, count: int) -> list[float]:
        """Seconds of the bystander's requests, when nobody else asks."""
        return [(await self.bystander())[0] for _ in range(count)]

    async def memory(self, pid: int) -> tuple[int, int]:
        """Bytes of the server, and how many of them are in its caches."""
        text = (await self.client.get("/metrics")).text
        kept = re.findall(r"^outrider:(?:(?:prefix|grammar)_cache|stored_response)_bytes (\S+)", text, re.MULTILINE)
        return memory_of(pid), round(sum(map(float, kept)))

    async def attack(self, case: Case) -> None:
        content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
        headers = {"content-type": "application/json"}
        hostile = asyncio.ensure_future(self.client.request(case.method, case.path, content=content, headers=headers))
        is_first = True
        while is_first or not hostile.done():
            seconds, text = await self.bystander()
            self.seconds[case.name] = max(seconds, self.seconds.get(case.name, 0.0))
            self.changed += [case.name] if text != self.text else []
            self.num_bystanders += 1
            is_first = False
        status = (await hostile).status_code
        self.wrong += [f"{case.name}: {status}"] if status not in case.statuses else []
        self.errors += [case.name] if status >= 500 else []


def p99_of(seconds: list[float]) -> float:
    """So many that one in a hundred is slower."""
    found = sorted(seconds)
    return found[int(0.99 * (len(found) - 1))]


async def run(address: str, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        found = Run(client)
        await found.warm_up()
        quiet, before = await found.alone(arguments.quiet), await found.memory(pid)
        cases = all_cases()
        for case in [*cases] * arguments.rounds:
            await found.attack(case)
        again = await found.alone(arguments.quiet)
        await asyncio.sleep(2 * _IDLE_S)
        after = await found.memory(pid)
    p99 = p99_of(quiet)
    slow = {name: round(seconds, 3) for name, seconds in found.seconds.items() if seconds > _SLOWER * p99}
    told = {"cases": len(cases), "rounds": arguments.rounds, "not_in_order": found.wrong, "server_errors": found.errors}
    told |= {"changed_texts": found.changed, "quiet_requests": len(quiet), "quiet_p99_s": round(p99, 4)}
    told |= {"quiet_slowest_s": round(max(quiet + again), 4), "quiet_too_slow": sum(one > _SLOWER * p99 for one in again)}
    told |= {"bystanders": found.num_bystanders, "slower_than_3_p99": slow}
    told |= {"slowest_s": round(max(found.seconds.values()), 4), "memory_before": before[0], "memory_after": after[0]}
    return {**told, "in_caches_before": before[1], "in_caches_after": after[1]}


def is_well(told: dict[str, Any]) -> bool:
    before, after = (told[f"memory_{when}"] - told[f"in_caches_{when}"] for when in ("before", "after"))
    return after <= _MORE_MEMORY * before and not any(
        told[name] for name in ("not_in_order", "server_errors", "changed_texts", "slower_than_3_p99")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quiet", type=int, default=500, help="requests of the bystander alone")
    parser.add_argument("--rounds", type=int, default=1, help="how often all cases are sent")
    parser.add_argument("--out", type=Path, help="file for the result")
    arguments = parser.parse_args()
    with served() as (pid, address):
        told = asyncio.run(run(address, pid, arguments))
    what = "hostile requests, each with a bystander"
    print(json.dumps(keep_results(arguments.out, what, [told], script="scripts/hostile_run.py")))
    return 0 if is_well(told) else 1


if __name__ == "__main__":
    sys.exit(main())
