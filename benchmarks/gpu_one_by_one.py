"""Requests that come one after another on a GPU: the time to the first token, and what rounds that take long wait for.

    PYTHONPATH=src python benchmarks/gpu_one_by_one.py [--tokens 64] [--requests 12] [--json FILE]

The models are those of ``serving_goodput.py``: the bundled pair in 8B shapes. There is one seat, and a request comes when the
one before it has ended, so nothing hides what a request costs besides its rounds. For each method and length of prompt: the
median milliseconds to the first token, tokens per second in all, and those while tokens are emitted. A round is slow if it took
three times the median. Of each slow round the file says how long it took, how many graphs were captured in it, and how long the
garbage collector ran. Rounds are captured beforehand. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seats import prompts_of
from serving_goodput import models, of_length

from outrider import SamplingParams
from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.core.method import Method
from outrider.core.request import Request, RequestState
from outrider.cuda_graphs import Rounds
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import Scheduler
from outrider.methods import compose
from outrider.rehearsal.rehearsal import KnownPrices, expect_prices

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain", "fixed", {}),
    "draft-model K=4": ("draft-model", "fixed", {"num_draft_tokens": 4}),
    "draft-model": ("draft-model", "adaptive", {"num_draft_tokens": 8}),
    "best-first 63": ("best-first", "fixed", {"num_draft_tokens": 8, "num_tree_nodes": 63}),
    "best-first": ("best-first", "adaptive", {"num_draft_tokens": 8, "num_tree_nodes": 63}),
}
SLOW = 3.0


class Collector:
    """Seconds in the garbage collector."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._told)

    def _told(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        self.seconds += now - self._began if phase == "stop" else 0.0
        self._began = now


class Bench:
    """Models, methods, and one seat."""

    def __init__(self) -> None:
        self.target, self.draft = models("auto", bundled_path("draft"))
        self.rounds, self.collector = Rounds(self.target), Collector()

    def method(self, name: str) -> Method:
        row, policy, options = METHODS[name]
        draft = None if row == "plain" else self.draft
        method = compose(row, self.target, draft=draft, policy=policy, options=options)
        label = {"benchmark": "gpu_one_by_one", "method": name}
        if policy == "adaptive":
            expect_prices(method, self.target, label, self.rounds.graphs_of, KnownPrices())
        list(self.rounds.prepare(method))
        return method

    def play(self, method: Method, prompts: list[list[int]], num_tokens: int) -> Iterator[dict[str, Any]]:
        """Every round of the requests: its seconds, the tokens it emitted, and what else happened in it."""
        params, graphs = SamplingParams(max_tokens=num_tokens, ignore_eos=True), self.rounds.graphs_of(method)
        scheduler = Scheduler(self.target, lambda _: method, slots=Slots(1, 4096), device_lane=self.rounds.lane)
        for number, prompt in enumerate(prompts):
            scheduler.submit(Job(number, RequestState.of(Request(prompt, params))))
            last, is_first = time.perf_counter(), True
            while not scheduler.is_idle:
                held, collected = len(graphs._rounds) if graphs else 0, self.collector.seconds
                tokens = sum(report.num_tokens for report in scheduler.round())
                now = time.perf_counter()
                captured = (len(graphs._rounds) if graphs else 0) - held
                gone = {"captured": captured, "collector": round(1e3 * (self.collector.seconds - collected), 1)}
                yield {"request": number, "seconds": now - last, "tokens": tokens, "first": is_first and tokens > 0, **gone}
                last, is_first = now, is_first and not tokens
        scheduler.close()


def told(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one method and length."""
    until = dict[int, float]()
    waits = list[float]()
    for one in rounds:
        until[one["request"]] = until.get(one["request"], 0.0) + one["seconds"]
        if one["first"]:
            waits.append(until[one["request"]])
    total, tokens = sum(one["seconds"] for one in rounds), sum(one["tokens"] for one in rounds)
    running = [one for one in rounds if one["tokens"] and not one["first"]]
    usual = statistics.median(one["seconds"] for one in running)
    slow = [
        {"ms": round(1e3 * one["seconds"], 1), "captured": one["captured"], "collector_ms": one["collector"], "round": number}
        for number, one in enumerate(rounds)
        if one in running and one["seconds"] > SLOW * usual
    ]
    row: dict[str, Any] = {
        "first_token_ms": round(1e3 * statistics.median(waits), 2),
        "tokens_per_second": round(tokens / total, 1),
        "while_emitting": round(sum(one["tokens"] for one in running) / sum(one["seconds"] for one in running), 1),
        "round_ms": round(1e3 * usual, 2),
        "slow_rounds": len(slow),
    }
    return row | ({"slow": sorted(slow, key=lambda one: -one["ms"])[:6]} if slow else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompts", type=int, nargs="+", default=[24, 100, 400, 1000])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench, rows = Bench(), list[dict[str, Any]]()
    for name in arguments.methods:
        method = bench.method(name)
        for length in arguments.prompts:
            prompts = [of_length(prompt, length) for prompt in prompts_of(arguments.requests)]
            list(bench.play(method, prompts[:2], 8))  # what is compiled once is no part of it
            rows.append({"method": name, "prompt": length} | told(list(bench.play(method, prompts, arguments.tokens))))
            print(rows[-1], flush=True)
    keep_results(arguments.json, "requests one after another in 8B shapes", rows, script="benchmarks/gpu_one_by_one.py")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
