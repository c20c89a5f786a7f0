"""The default policy against fixed settings from its first round on, at seats that come in a given order.

    PYTHONPATH=src python benchmarks/policy_orders.py --seats 1 8 32 64 128 [--order shuffled] [--json FILE]
    PYTHONPATH=src python benchmarks/policy_orders.py --seats 1 8 64 --useless --fixed 4         a draft that is never right
    PYTHONPATH=src python benchmarks/policy_orders.py --method best-first --seats 1 --fixed 8 16 32 64      trees, by nodes

One process is one order: the policy keeps what it has learnt from one number of seats to the next, and nothing from before.
All seats are always taken. At each number of seats the policy plays ``--first`` rounds and ``--later`` ones after them. Then
every fixed setting answers the same requests until it has emitted what the policy had after its first rounds. The best of
them plays on until it has emitted what the policy had after the later ones, so each span is compared on the same texts. Figures
are tokens per second, without a GPU per second of processor time, since other work on the machine must not count. Captures and
compilations come before. The models are those of ``serving_goodput.py``: the bundled pair in 8B shapes on a GPU, and itself
elsewhere. Texts repeat after ``max(seats, 4)`` requests of 192 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from default_policy import useless_draft
from seats import prompts_of
from serving_goodput import models

from outrider import SamplingParams
from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.core.method import Method
from outrider.core.request import Request, RequestState
from outrider.cuda_graphs import Rounds
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import Scheduler
from outrider.methods import compose
from outrider.policies.adaptive import Adaptive
from outrider.rehearsal.rehearsal import KnownPrices, expect_prices

NUM_TOKENS = 192


class Round(NamedTuple):
    """Where a run stood after a round."""

    tokens: int
    seconds: float
    guesses: float
    """Guesses of a row."""
    plan: str
    """Why so many, and how many along the longest path."""


class Bench:
    """Models and methods."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        draft = useless_draft(bundled_path("draft")) if arguments.useless else bundled_path("draft")
        self.target, self.draft = models(arguments.numerics, draft)
        self.rounds, self.name = Rounds(self.target), arguments.method
        self._clock = time.perf_counter if self.target.device.type == "cuda" else time.process_time
        self.methods: dict[str, Method] = {"off": compose("plain", self.target)}
        for size in arguments.fixed:
            self.methods[str(size)] = self._method("fixed", size)
        self.methods["auto"] = self._method("adaptive", max(arguments.fixed))
        label = {"benchmark": "policy_orders", "method": self.name, "useless": arguments.useless, "most": max(arguments.fixed)}
        expect_prices(self.methods["auto"], self.target, label, self.rounds.graphs_of, KnownPrices())

    def _method(self, policy: str, size: int) -> Method:
        nodes = {"num_draft_tokens": 8, "num_tree_nodes": size} if self.name == "best-first" else {"num_draft_tokens": size}
        return compose(self.name, self.target, draft=self.draft, policy=policy, options=nodes)

    def prepare(self, seats: int) -> None:
        for method in self.methods.values():
            for _ in self.rounds.prepare(method, [seats]):
                pass

    def play(self, mode: str, seats: int) -> Iterator[Round]:
        """Rounds with all seats taken, without end."""
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts, numbers, tokens, began = prompts_of(max(seats, 4)), count(), 0, 0.0
        lane = self.rounds.lane
        scheduler = Scheduler(self.target, lambda _: self.methods[mode], slots=Slots(seats, 4096), device_lane=lane)
        try:
            while True:
                while scheduler.num_waiting + scheduler.num_running <= seats:
                    number = next(numbers)
                    request = Request(prompts[number % len(prompts)], params)
                    scheduler.submit(Job(number, RequestState.of(request), mode))
                for report in scheduler.round():
                    now = self._clock()
                    tokens, began = tokens + (report.num_tokens if began else 0), began or now
                    plan = f"{report.reason.code.value if report.reason else ''} {max(report.drafted)}"
                    yield Round(tokens, now - began, sum(report.drafted) / len(report.drafted), plan)
        finally:
            scheduler.close()


def measure(bench: Bench, seats: int, first: int, later: int) -> dict[str, Any]:
    """Tokens per second of all settings at one number of seats. The best setting plays on over what the policy did later."""
    bench.prepare(seats)
    auto = [one for one, _ in zip(bench.play("auto", seats), range(1 + first + later), strict=False)]
    early, end = auto[first], auto[-1]
    spans = [(0, early.tokens), (early.tokens, end.tokens)]
    speeds = {mode: speed_over(bench.play(mode, seats), spans[:1])[0] for mode in bench.methods if mode != "auto"}
    best = max(speeds, key=speeds.__getitem__)
    at_first = early.tokens / early.seconds
    row: dict[str, Any] = {"seats": seats, "first": round(at_first, 1)}
    row |= {mode: round(speed, 1) for mode, speed in speeds.items()}
    row |= {"best": best, "first_to_best": round(at_first / speeds[best], 4)}
    if later:
        speed = (end.tokens - early.tokens) / (end.seconds - early.seconds)
        best_later = speed_over(bench.play(best, seats), spans)[1]
        row |= {"later": round(speed, 1), "best_later": round(best_later, 1), "later_to_best": round(speed / best_later, 4)}
    return row | told(auto) | {"believed": believed(bench.methods["auto"], seats)}


def told(auto: list[Round]) -> dict[str, Any]:
    """What the policy did, and the rounds that took longest: number, milliseconds, plan."""
    spans = [(now.seconds - before.seconds, number, now.plan) for number, (before, now) in enumerate(pairwise(auto), 1)]
    slowest = [[number, round(1e3 * seconds, 1), plan] for seconds, number, plan in sorted(spans, reverse=True)[:5]]
    guesses = [round(sum(one.guesses for one in auto[at : at + 50]) / 50, 2) for at in range(1, len(auto) - 49, 50)]
    usual = round(1e3 * sorted(spans)[len(spans) // 2][0], 2)
    return {"guesses": guesses, "plans": Counter(one.plan for one in auto[1:]), "median_ms": usual, "slowest": slowest}


def believed(method: Method, seats: int) -> dict[str, Any]:
    """What the policy knows in the end: milliseconds by length, the doubts in them, and acceptance by position."""
    policy = method.policy
    assert isinstance(policy, Adaptive)
    policy.learn()
    costs, lengths = policy.costs.of(seats), range(policy.options.num_draft_tokens + 1)
    parts = zip(costs.table(1, lengths), costs.table(0, lengths), strict=True)
    return {
        "ms": [round(1e3 * costs.pace * (draft + rest), 2) for draft, rest in parts],
        "doubts": [round(doubt, 3) for doubt in costs.doubts(lengths)],
        "rates": {spread: [round(rate, 3) for rate in seen.means] for spread, seen in policy.usual.seen.items()},
        "pace": round(costs.pace, 3),
    }


def speed_over(rounds: Iterator[Round], spans: Sequence[tuple[int, int]]) -> list[float]:
    """Tokens per second between these numbers of tokens, which follow each other."""
    done, found = Round(0, 0.0, 0.0, ""), list[float]()
    for _, end in spans:
        before, done = done, next(one for one in rounds if one.tokens >= end)
        found.append((done.tokens - before.tokens) / (done.seconds - before.seconds))
    return found


def in_order(seats: list[int], order: str) -> list[int]:
    if order == "shuffled":
        return random.Random(0).sample(seats, len(seats))
    return sorted(seats, reverse=order == "falling")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seats", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--order", choices=("rising", "falling", "shuffled"), default="rising")
    parser.add_argument("--method", choices=("draft-model", "best-first"), default="draft-model")
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 4, 6, 8], help="lengths, or nodes of trees")
    parser.add_argument("--useless", action="store_true", help="a draft whose vocabulary is shuffled")
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--later", type=int, default=1000)
    parser.add_argument("--numerics", default="auto")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which no further number of seats begins")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    bench = Bench(arguments)
    what = f"tokens per second by seats in {arguments.order} order, {arguments.method}, the default policy and fixed settings"
    for seats in in_order(arguments.seats, arguments.order):
        if time.perf_counter() - began < arguments.limit:
            rows.append(measure(bench, seats, arguments.first, arguments.later))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                document = {**results_head(what, script="benchmarks/policy_orders.py"), "rows": rows}
                arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
