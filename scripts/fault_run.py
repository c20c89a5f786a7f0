"""Mixed load with random faults: nothing is lost without an error, no text changes, nothing is held afterwards.

    python scripts/fault_run.py [--minutes 30] [--clients 8] [--page-len 16] [--seed 0] [--out FILE]

A server runs in this process on the loopback. Clients send requests, whole and streamed, with and without a grammar, and
conversations of two turns whose second goes on from the stored first. Meanwhile faults come at random. The engine raises in the
middle of a round, processes that compile grammars are killed, and the clock jumps by an hour. Readers read slowly or leave, and
the audit log lies on a full disk. Every request must end in one of two ways: with the text that it gets alone, or with an error
that says so. Afterwards no request, row or page may be held. The last line is JSON. The exit code is 1 if a request was lost, a
text was wrong or something is held.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from outrider import LLM
from outrider.bench.provenance import keep_results
from outrider.cache.paged import PagedCache
from outrider.server.logs import log_as_json
from outrider.server.run import bind, serve
from outrider.server.service import Service
from outrider.server.settings import ServerSettings

PROMPTS = ("Once upon a time", "One day, a little girl", "Tom and his dog", "The old man", "Lily liked to")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}},
    "required": ["name"],
    "additionalProperties": False,
}
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
_PATIENCE_S = 600
"""Longer than anything here takes, so that a request that ends by it is lost."""
_REAL_CLOCK = time.time


def request(rng: random.Random) -> dict[str, Any]:
    """One of a few hundred requests, so that its text alone has to be found out once only."""
    asked: dict[str, Any] = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.choice([8, 24, 48]), "seed": rng.randrange(6)}
    asked |= {"temperature": rng.choice([0, 0.8]), "ignore_eos": True}
    if rng.random() < 0.2:
        words = [*SCHEMA["properties"]["name"]["enum"], f"N{rng.randrange(30)}"]  # many grammars: each is compiled anew
        schema = {**SCHEMA, "properties": {"name": {"enum": words}}}
        asked |= {"guided_json": schema, "ignore_eos": False}
    return asked


def text_of(answer: dict[str, Any]) -> str:
    """The text of a completion or a response."""
    return answer["choices"][0]["text"] if "choices" in answer else answer["output"][0]["content"][0]["text"]


class Faults:
    """What goes wrong, and how often it did."""

    def __init__(self, service: Service, rng: random.Random) -> None:
        self.service, self.rng, self.counts = service, rng, Counter[str]()
        self.kinds: dict[str, Callable[[], bool]] = {
            "engine": self.engine,
            "compiler": self.compiler,
            "clock": self.clock,
        }

    def strike(self) -> None:
        name = self.rng.choice(list(self.kinds))
        self.counts[name] += self.kinds[name]()

    def engine(self) -> bool:
        """The next round raises after it ran, so that requests were changed by it; a fresh scheduler has its own method."""
        scheduler = self.service.worker.scheduler
        real = scheduler.round

        def broken() -> Any:
            real()
            raise RuntimeError("a fault that was injected")

        scheduler.round = broken  # pyright: ignore[reportAttributeAccessIssue]
        return True

    def compiler(self) -> bool:
        """Kill the processes that compile grammars, idle or busy. They are children of this one."""
        children = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        children += [pid for task in Path("/proc/self/task").iterdir() for pid in _children(task)]
        compilers = {pid for pid in children if "grammar_trial" in _command(pid)}
        for pid in compilers:
            os.kill(pid, signal.SIGKILL)
        return bool(compilers)

    def clock(self) -> bool:
        """The wall clock is an hour ahead or behind, until it jumps again."""
        shift = self.rng.choice([-3600.0, 0.0, 3600.0])
        time.time = lambda: _REAL_CLOCK() + shift
        return True


def _children(task: Path) -> list[int]:
    try:
        return [int(pid) for pid in (task / "children").read_text().split()]
    except OSError:  # the thread has ended
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


class Load:
    """Clients, and what became of their requests."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.address, self.rng = address, rng
        self.counts = Counter[str]()
        self.texts: dict[str, str] = {}
        """Texts of requests, each served alone."""
        self.answers: list[tuple[str, str, str]] = []
        """Path, request and text of each."""

    async def client(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self.address, timeout=_PATIENCE_S) as client:
            while time.monotonic() < until:
                asked, kind = request(self.rng), self.rng.choice(["whole", "talk", "stream", "slow", "leave"])
                self.counts[await self.one(client, asked, kind)] += 1

    async def one(self, client: httpx.AsyncClient, asked: dict[str, Any], kind: str) -> str:
        """How a request ended."""
        try:
            if kind == "talk":
                return await self.talked(client, asked)
            if kind == "whole":
                answer = await client.post(COMPLETIONS, json=asked)
                return self.ended(COMPLETIONS, asked, answer)
            return await self.streamed(client, asked, kind)
        except (httpx.HTTPError, ValueError) as error:
            print(f"lost: {type(error).__name__} {error} {asked}", file=sys.stderr)
            return "lost"

    def ended(self, path: str, asked: dict[str, Any], answer: httpx.Response) -> str:
        if answer.status_code != 200:
            return f"error_{answer.status_code}" if answer.json().get("error", {}).get("message") else "lost"
        self.answers.append((path, json.dumps(asked), text_of(answer.json())))
        return "answered"

    async def talked(self, client: httpx.AsyncClient, wanted: dict[str, Any]) -> str:
        """Two turns. The second one's text has to be that of the whole conversation sent at once."""
        asked = {"input": wanted["prompt"], "max_output_tokens": wanted["max_tokens"]}
        asked |= {name: wanted[name] for name in ("temperature", "seed")}
        first = await client.post(RESPONSES, json=asked)
        ended = self.ended(RESPONSES, asked, first)
        if ended != "answered":
            return ended
        told = first.json()
        said = [("user", asked["input"]), ("assistant", text_of(told)), ("user", "And then?")]
        whole = {**asked, "input": [{"role": role, "content": content} for role, content in said], "store": False}
        more = {**asked, "input": "And then?", "previous_response_id": told["id"]}
        return self.ended(RESPONSES, whole, await client.post(RESPONSES, json=more))

    async def streamed(self, client: httpx.AsyncClient, asked: dict[str, Any], kind: str) -> str:
        text, is_over = "", False
        async with client.stream("POST", COMPLETIONS, json={**asked, "stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return self.ended(COMPLETIONS, asked, answer)
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_over = True
                    break
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return "error_in_stream"
                text += "".join(choice["text"] for choice in chunk["choices"])
                if kind == "leave" and text:
                    return "left"
                if kind == "slow":
                    await asyncio.sleep(0.05)
        if not is_over:
            print(f"lost: the stream ended without a word {asked}", file=sys.stderr)
            return "lost"
        self.answers.append((COMPLETIONS, json.dumps(asked), text))
        return "answered"

    async def compare(self) -> int:
        """Ask again, alone and without faults; how many texts were different."""
        wrong = 0
        async with httpx.AsyncClient(base_url=self.address, timeout=None) as client:
            await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2})  # meets a fault that still waits
            for path, asked, text in self.answers:
                if asked not in self.texts:
                    answer = await client.post(path, json={**json.loads(asked), "speculation": "off"})
                    self.texts[asked] = text_of(answer.json())
                if self.texts[asked] != text:
                    wrong += 1
                    print(f"different: {asked}: {text!r} alone: {self.texts[asked]!r}", file=sys.stderr)
        return wrong


def held(service: Service) -> dict[str, int]:
    """Everything that is still held when no request runs. After the shared beginnings are forgotten, it is no page."""
    scheduler = service.worker.scheduler
    scheduler.check_integrity()
    if scheduler.prefixes is not None:
        scheduler.prefixes.clear()
    gc.collect()
    cache = service.llm.target.new_cache(1)
    pages = cache.pool.num_used if isinstance(cache, PagedCache) else 0
    running = scheduler.num_running + scheduler.num_waiting
    return {"requests": service.num_active, "rows": running, "pages": pages, "bytes": scheduler.cache_bytes}


async def strike_until(faults: Faults, until: float, pause: float) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(faults.rng.uniform(0.2, 2) * pause)
        faults.strike()


async def run(arguments: argparse.Namespace, service: Service, address: str) -> int:
    rng = random.Random(arguments.seed)
    load, faults = Load(address, rng), Faults(service, random.Random(arguments.seed + 1))
    until = time.monotonic() + 60 * arguments.minutes
    await asyncio.gather(strike_until(faults, until, arguments.pause), *(load.client(until) for _ in range(arguments.clients)))
    time.time = _REAL_CLOCK
    await asyncio.sleep(2)
    print(f"load is over: {dict(load.counts)}; comparing {len(load.answers)} texts", file=sys.stderr, flush=True)
    wrong = await load.compare()
    await asyncio.sleep(2)
    left = held(service)
    told = {"minutes": arguments.minutes, "requests": sum(load.counts.values()), **dict(sorted(load.counts.items()))}
    told |= {"different": wrong, "faults": dict(faults.counts), "engine_restarts": service.worker.num_failures}
    told |= {"lost": load.counts["lost"], "audit_lines_lost": service.audit.num_lost, "held": left}
    what = "mixed load with faults injected"
    print(json.dumps(keep_results(arguments.out, what, [told], script="scripts/fault_run.py")))
    return 1 if load.counts["lost"] or wrong or any(left.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between faults, about")
    parser.add_argument("--page-len", type=int, default=16, help="0 keeps one block per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result")
    arguments = parser.parse_args()
    log_as_json("critical")
    listener = bind("127.0.0.1", 0)
    full = "/dev/full" if Path("/dev/full").exists() else None
    service = Service(LLM(page_len=arguments.page_len), ServerSettings(audit_log=full, max_rows=8))
    result: list[int] = []
    ready = threading.Event()

    def work() -> None:
        ready.wait()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            result.append(asyncio.run(run(arguments, service, address)))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # serve() drains and returns

    threading.Thread(target=work, daemon=True).start()
    serve(service, listener, on_ready=lambda _: ready.set())
    return result[0] if result else 1


if __name__ == "__main__":
    sys.exit(main())
