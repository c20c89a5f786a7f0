"""Prompts in the passes of rounds against prompts in passes of their own, with requests that come and go.

    python benchmarks/prompts_beside.py [--clients 1 8 32] [--beginnings 1 60] [--methods plain draft-model] [--rounds 300]
                                        [--models MODEL DRAFT] [--json build/prompts_beside.json]

Two schedulers serve the same requests in lockstep: the one that has emitted less makes the next round. One reads prompts in
the passes of rounds. The other is given the same target without that capability. Each client sends its next request when the
last is answered. A gap is a round, since whoever runs has its next tokens then. Time is that of the thread, without what other
work on the machine had, and passes have one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.bench.suites import BEGINNINGS
from outrider.bundled import bundled_path
from outrider.core.own_time import own_seconds
from outrider.core.request import Request, RequestState
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import Scheduler

WHAT = "requests of 32 to 96 tokens that come and go: tokens per second and rounds, by the thread's own time, one thread"


@dataclass
class Side:
    """A scheduler that is kept busy."""

    scheduler: Scheduler
    requests: Iterator[Request]
    num_clients: int
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    _number: int = 0
    _running: int = 0

    def step(self) -> None:
        while self._running < self.num_clients:
            self.scheduler.submit(Job(self._number, RequestState.of(next(self.requests))))
            self._number, self._running = self._number + 1, self._running + 1
        began = own_seconds()
        reports = self.scheduler.round()
        self.gaps.append(own_seconds() - began)
        self.num_tokens += sum(report.num_tokens for report in reports)
        self._running -= sum(state.is_finished for report in reports for state in report.states)

    def forget(self) -> None:
        self.num_tokens, self.gaps = 0, []


def requests_of(llm: LLM, num_beginnings: int) -> Iterator[Request]:
    chance = random.Random(0)
    while True:
        prompt = ". ".join(chance.choice(BEGINNINGS) for _ in range(num_beginnings))
        params = SamplingParams(max_tokens=chance.randint(32, 96), seed=chance.randrange(1000), temperature=1, ignore_eos=True)
        yield from llm.requests([prompt], [params])


def measure(llm: LLM, method: str, num_clients: int, num_beginnings: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways of reading, in lockstep."""
    sides = dict[str, Side]()
    apart = copy(llm.target)
    apart.most_read = 0  # pyright: ignore[reportAttributeAccessIssue]
    for name, target in (("apart", apart), ("beside", llm.target)):
        composed, slots = llm.compose(method), Slots(num_clients, reading_rounds=args.reading_rounds)
        scheduler = Scheduler(target, lambda _, found=composed: found, slots=slots, isolates=False)
        sides[name] = Side(scheduler, requests_of(llm, num_beginnings), num_clients)
    for number in range(2 * (args.warmup + args.rounds)):
        if number == 2 * args.warmup:
            for side in sides.values():
                side.forget()
        min(sides.values(), key=lambda side: side.num_tokens).step()
    row: dict[str, Any] = {"method": method, "clients": num_clients, "beginnings": num_beginnings}
    for name, side in sides.items():
        row[f"{name}: tokens/s"] = round(side.num_tokens / sum(side.gaps), 1)
        row[f"{name}: median round (ms)"] = round(1e3 * statistics.median(side.gaps), 2)
        row[f"{name}: p99 round (ms)"] = round(1e3 * statistics.quantiles(side.gaps, n=100)[98], 2)
    return row | {"beside / apart": round(row["beside: tokens/s"] / row["apart: tokens/s"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beginnings", type=int, nargs="+", default=[1, 60], help="beginnings of stories in a prompt")
    parser.add_argument("--methods", nargs="+", default=["plain", "draft-model"])
    parser.add_argument("--models", nargs=2, metavar=("MODEL", "DRAFT"))
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--reading-rounds", type=float, default=0.5)
    parser.add_argument("--json", type=Path, help="where the table goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, draft = args.models or (None, bundled_path("draft"))
    llm, rows = LLM(model, draft=draft), list[dict[str, Any]]()
    for method in args.methods:
        for num_beginnings in args.beginnings:
            for num_clients in args.clients:
                rows.append(measure(llm, method, num_clients, num_beginnings, args))
                print(", ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
                keep_results(args.json, WHAT, rows, script="benchmarks/prompts_beside.py")


if __name__ == "__main__":
    main()
