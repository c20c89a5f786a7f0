"""A fleet on Ray Serve under load: a replica is killed, drafts are replaced, and prefix routing is compared with random.

    python benchmarks/ray_run.py [--replicas 3] [--requests 300] [--clients 16] [--out FILE]

Three runs of `outrider serve --replicas N` with the bundled model, one after the other. Each gets the same mixed requests:
whole and streamed, greedy and sampled, over a few dozen beginnings that several requests share.

1. faults: after a quarter of the answers the draft's folder gets noisy weights and the fleet a SIGHUP, after half of them one
   replica is killed with SIGKILL. Every request must end with its text or with an error that can be retried. Texts must be
   those of plain decoding, asked afterwards. Seconds are counted from the kill to the next answer of a request that was sent
   after it, and until all replicas answer again.
2. and 3. routing by prefix and at random, without faults: the share of prompt tokens that was found in a prefix cache.

The last line is JSON. The exit code is 1 if a request was lost or hung, or a text was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from outrider.bench.provenance import provenance
from outrider.bundled import bundled_path

_NAMES = ("Tom", "Lily", "Ben", "Mia", "Sam", "Anna")
_PLACES = ("in the park", "by the sea", "at the farm", "in a small house")
_HANG_S = 120.0


def beginnings() -> list[str]:
    """Two dozen stories' openings of some fifty tokens, which differ from the first word on."""
    return [
        f"{name} was {place} with a big red ball and a little brown dog. The sun was warm and the birds were singing. "
        f"{name} wanted to play all day long. Then a friend came along and asked what the ball was for. "
        for name in _NAMES
        for place in _PLACES
    ]


def requests_of(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    opened = beginnings()
    endings = ("They", "The dog", "Mom said", "One day", "It was", "But then")
    return [
        {
            "prompt": rng.choice(opened) + rng.choice(endings),
            "max_tokens": rng.choice([8, 16, 32]),
            "temperature": rng.choice([0, 0.8]),
            "seed": rng.randrange(4),
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


class Served:
    """`outrider serve --replicas N` in a process of its own, with a draft folder that can be changed."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, routing: str, more: Sequence[str] = ()) -> None:
        flags = ["--replicas", str(arguments.replicas), "--routing", routing, "--port", "0", "--log-level", "error"]
        models = ["--model", bundled_path("target"), "--draft", str(folder)]
        command = [sys.executable, "-m", "outrider", "serve", *flags, *models, *more]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = None
        while found is None:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("the fleet did not start; its errors are above")
            found = re.search(r"at (http://\S+:\d+)/", line)
        self.address, self.start_s = found[1], time.monotonic() - self.began
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True).start()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)

    def replica_pids(self) -> list[int]:
        """Replicas that descend from this server: other fleets of the machine are left alone."""
        parents = {pid: parent for pid, parent, _ in _processes()}
        replicas = [pid for pid, _, name in _processes() if name.startswith("ray::ServeReplica")]
        return [pid for pid in replicas if self.process.pid in _ancestors(pid, parents)]


def _processes() -> list[tuple[int, int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found.append((int(entry.name), parent, (entry / "cmdline").read_text().replace("\0", " ")))
            except OSError:  # it has ended meanwhile
                continue
    return found


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while pid in parents and pid > 1:
        pid = parents[pid]
        found.append(pid)
    return found


@dataclass
class Load:
    """Outcomes of the requests of a load."""

    counts: Counter[str] = field(default_factory=Counter)
    texts: list[tuple[str, str]] = field(default_factory=list)
    sent_and_answered: list[tuple[float, float]] = field(default_factory=list)

    async def run(self, address: str, asked: list[dict[str, Any]], num_clients: int) -> None:
        waiting = list(reversed(asked))

        async def client() -> None:
            async with httpx.AsyncClient(base_url=address, timeout=_HANG_S) as http:
                while waiting:
                    await self._one(http, waiting.pop())

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def _one(self, http: httpx.AsyncClient, asked: dict[str, Any]) -> None:
        sent = time.monotonic()
        try:
            ended, text = await (_streamed(http, asked) if asked["stream"] else _whole(http, asked))
        except httpx.TimeoutException:
            ended, text = "hung", ""
        except (httpx.HTTPError, ValueError) as error:
            print(f"lost: {error!r}", file=sys.stderr)
            ended, text = "lost", ""
        self.counts[ended] += 1
        if ended == "answered":
            self.sent_and_answered.append((sent, time.monotonic()))
            self.texts.append((json.dumps({**asked, "stream": False}), text))


async def _whole(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, str]:
    answer = await http.post("/v1/completions", json=asked)
    told = answer.json()
    if answer.status_code != 200:
        return f"error_{told['error']['code']}", ""
    return "answered", told["choices"][0]["text"]


async def _streamed(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, str]:
    text = ""
    async with http.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code != 200:
            return f"error_{json.loads(await answer.aread())['error']['code']}", ""
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "answered", text
            if line.startswith("data: "):
                told = json.loads(line[6:])
                if "error" in told:
                    return f"error_in_stream_{told['error']['code']}", ""
                text += "".join(choice["text"] for choice in told["choices"])
    print("lost: a stream ended without a word", file=sys.stderr)
    return "lost", ""


async def wrong_texts(address: str, texts: list[tuple[str, str]]) -> int:
    """How many differ from plain decoding of the same request, asked once for each."""
    plain: dict[str, str] = {}
    asked = sorted({request for request, _ in texts})

    async def ask(http: httpx.AsyncClient, mine: list[str]) -> None:
        for request in mine:
            answer = await http.post("/v1/completions", json={**json.loads(request), "speculation": "off"})
            plain[request] = answer.json()["choices"][0]["text"]

    async with httpx.AsyncClient(base_url=address, timeout=_HANG_S) as http:
        await asyncio.gather(*(ask(http, asked[start::8]) for start in range(8)))
    return sum(plain[request] != text for request, text in texts)


async def until(load: Load, answers: int) -> None:
    while sum(load.counts.values()) < answers:
        await asyncio.sleep(0.02)


async def strike(served: Served, load: Load, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Replace the drafts, then kill a replica and wait until the fleet is whole."""
    await until(load, arguments.requests // 4)
    add_noise(folder)
    swapped = time.monotonic()
    served.process.send_signal(signal.SIGHUP)
    while not any("draft with the new model" in line for line in served.lines):
        await asyncio.sleep(0.05)
    told = {"swap_s": time.monotonic() - swapped, "swap_said": served.lines[-1].strip()}
    await until(load, arguments.requests // 2)
    victim = served.replica_pids()[0]
    os.kill(victim, signal.SIGKILL)
    killed, unanswered = time.monotonic(), arguments.requests - sum(load.counts.values())
    async with httpx.AsyncClient(base_url=served.address, timeout=30) as http:
        while victim in served.replica_pids() or (await http.get("/health")).json()["replicas"] < arguments.replicas:
            await asyncio.sleep(0.1)
    return {**told, "killed": killed, "unanswered": unanswered, "whole_s": time.monotonic() - killed}


def add_noise(folder: Path) -> None:
    """Another draft of the same shape, as a training run would write it: the weights with 2 % of noise."""
    file = folder / "model.safetensors"
    torch.manual_seed(0)
    noisy = {name: one + 0.02 * one.float().std() * torch.randn(one.shape) for name, one in load_file(file).items()}
    kinds = {name: one.dtype for name, one in load_file(file).items()}
    save_file({name: one.to(kinds[name]) for name, one in noisy.items()}, folder / "new.safetensors")
    os.replace(folder / "new.safetensors", file)


async def metrics_of(address: str) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=address, timeout=30) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    sums: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            sums[name.partition("{")[0].removeprefix("outrider:")] += float(value)
    return dict(sums)


async def faults(served: Served, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    load = Load()
    asked = requests_of(arguments.requests, seed=0)
    told, _ = await asyncio.gather(strike(served, load, arguments, folder), load.run(served.address, asked, arguments.clients))
    after = [done - told["killed"] for sent, done in load.sent_and_answered if sent >= told["killed"]]
    counted = await metrics_of(served.address)
    return {
        "requests": sum(load.counts.values()),
        **dict(sorted(load.counts.items())),
        "different": await wrong_texts(served.address, load.texts),
        "asked_again": counted.get("fleet_repeated_total", 0),
        "asked_when_killed": told["unanswered"],
        "swap_said": told["swap_said"],
        "next_answer_s": round(min(after), 3) if after else None,
        "all_replicas_s": round(told["whole_s"], 2),
        "swap_s": round(told["swap_s"], 2),
        "start_s": round(served.start_s, 2),
    }


async def hit_rate(served: Served, arguments: argparse.Namespace) -> dict[str, Any]:
    load = Load()
    began = time.monotonic()
    await load.run(served.address, requests_of(arguments.requests, seed=1), arguments.clients)
    seconds = time.monotonic() - began
    counted = await metrics_of(served.address)
    return {
        **dict(load.counts),
        "hit_rate": round(counted["prefix_cache_hit_tokens_total"] / counted["prompt_tokens_total"], 4),
        "prompt_tokens": counted["prompt_tokens_total"],
        "tokens_per_s": round(counted["generation_tokens_total"] / seconds, 1),
        "median_s": round(statistics.median(done - sent for sent, done in load.sent_and_answered), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--routing", nargs="*", default=["prefix", "random"], help="what is compared after the faults")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    told: dict[str, Any] = {"replicas": arguments.replicas, "clients": arguments.clients}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "draft"
        shutil.copytree(bundled_path("draft"), folder)
        with Served(arguments, folder, "prefix") as served:
            told["faults"] = asyncio.run(faults(served, arguments, folder))
        print(told["faults"], file=sys.stderr, flush=True)
        for routing in arguments.routing:
            with Served(arguments, folder, routing) as served:
                told[routing] = asyncio.run(hit_rate(served, arguments))
            print(routing, told[routing], file=sys.stderr, flush=True)
    document = json.dumps({**told, "provenance": provenance()})
    if arguments.out:
        arguments.out.write_text(document + "\n", encoding="utf-8")
    print(document)
    bad = [told["faults"].get(name, 0) for name in ("lost", "hung", "different")]
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
