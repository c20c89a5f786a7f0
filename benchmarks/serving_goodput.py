"""Goodput against batch size on a GPU: speculation off, of a fixed length and auto, with requests that come and go.

    PYTHONPATH=src python benchmarks/serving_goodput.py [--loops captured server] [--batches 1 8 32 64] [--limit 120]
    PYTHONPATH=src python benchmarks/serving_goodput.py --fixed 1 2 4 6 8 --batches 64 8 1     every length, another order
    PYTHONPATH=src python benchmarks/serving_goodput.py --prompt-tokens 1000 --batches 64      long prompts

A load generator in the process: always ``batch`` requests at once, each with 32 to 96 tokens. The next one waits for one to
end. Goodput is tokens per second while all places are taken. ``static`` is the same without speculation when all requests begin
at once and none follows. The gap is the time between two tokens of one request, its 99th percentile in medians. All loops are
the scheduler (``engine/scheduler.py``). Loop ``captured`` is set up as by ``LLM.generate`` and ``server`` as by ``outrider
serve``. Both have whole rounds as graphs, and the device is one round ahead of the host (``engine/device_lane.py``). Loop
``host`` has no graphs. Loops ``eqspec`` and ``exspec`` are the host with the groupings of rectangular batches
(``engine/grouping.py``), the second with a window of three batches. The models are the bundled pair in 8B shapes
(recipes/inflate.py); on a machine without a GPU, the bundled pair itself. Modes take turns; what is not measured when ``limit``
seconds are over is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "recipes")]
from inflate import LLAMA_8B, ONE_LAYER_DRAFT, inflated_weights  # noqa: E402  # pyright: ignore

from outrider import SamplingParams  # noqa: E402
from outrider.bench.provenance import keep_results  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.codecs.load import load_codec  # noqa: E402
from outrider.core.interfaces import Target  # noqa: E402
from outrider.core.method import Method  # noqa: E402
from outrider.core.report import Progress, RoundReport  # noqa: E402
from outrider.core.request import Request, RequestState  # noqa: E402
from outrider.cuda_graphs import Rounds  # noqa: E402
from outrider.engine.job import Job, Slots  # noqa: E402
from outrider.engine.scheduler import Scheduler  # noqa: E402
from outrider.methods import compose  # noqa: E402
from outrider.models.gpu import gpu_decoder  # noqa: E402
from outrider.models.load import load_model  # noqa: E402
from outrider.rehearsal.rehearsal import KnownPrices, expect_prices  # noqa: E402

STORIES = (
    "Once upon a time, there was a little fox who lived in a forest. The fox had a red ball. One day, the fox",
    "Tom and Lily went to the park. They saw a big dog. The dog was sad because it had lost its bone. Tom said",
    "One day, a girl named Mia found a box in the garden. She wanted to open the box, but the box was shut. Mia",
    "The old man had a small boat. Every morning he went to the sea in his boat to catch fish. One morning",
)
WHAT = "tokens per second with requests that come and go"
TURNS = 3
"""Requests per place."""


class Account:
    """Where the time of rounds goes: rounds that read prompts take longer, and places that are empty emit nothing."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._last: RoundReport | None = None
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._num_rows = 0

    def add(self, report: RoundReport) -> None:
        if report is not self._last:
            self._last = report
            self._seconds[report.seen.prompts.num_tokens > 0].append(report.seconds)
            self._num_rows += len(report.ids)

    def to_json(self) -> dict[str, Any]:
        plain, reading = self._seconds[False], self._seconds[True]
        return {
            "rounds": len(plain) + len(reading),
            "reading_share": round(len(reading) / max(1, len(plain) + len(reading)), 3),
            "plain_ms": round(1e3 * statistics.median(plain), 3) if plain else None,
            "reading_ms": round(1e3 * statistics.median(reading), 3) if reading else None,
            "rounds_seconds": round(sum(plain) + sum(reading), 3),
            "places_taken": round(self._num_rows / max(1, len(plain) + len(reading)) / self._batch, 3),
        }


class Bench:
    """Models, methods, requests."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.target, self.draft = models(arguments.numerics, bundled_path("draft"))
        self.rounds = Rounds(self.target)
        codec = load_codec(bundled_path("target"))
        self.prompts = [of_length(codec.encode(story), arguments.prompt_tokens) for story in STORIES]
        self.gaps, self.account = list[float](), Account(1)
        self.temperature, self.began, self.limit = arguments.temperature, time.perf_counter(), arguments.limit
        self.layout_seconds = self.layout_share = 0.0
        most = {"num_draft_tokens": arguments.most}
        self.methods: dict[str, Method] = {
            "off": compose("plain", self.target),
            **{
                f"K={length}": compose("draft-model", self.target, draft=self.draft, options={"num_draft_tokens": length})
                for length in arguments.fixed
            },
            "auto": compose("draft-model", self.target, draft=self.draft, policy="adaptive", options=most),
        }
        label = {"benchmark": "serving_goodput", "numerics": arguments.numerics, **most}
        expect_prices(self.methods["auto"], self.target, label, self.rounds.graphs_of, KnownPrices())

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self.began > self.limit

    def requests(self, count: int) -> list[Request]:
        rng = random.Random(count)
        drawn = [(rng.choice(self.prompts), rng.randint(32, 96), rng.randrange(1000)) for _ in range(count)]
        return [
            Request(prompt, SamplingParams(max_tokens=size, temperature=self.temperature, seed=seed, ignore_eos=True))
            for prompt, size, seed in drawn
        ]

    def steps(self, loop: str, mode: str, requests: Sequence[Request], batch: int) -> Iterator[Progress]:
        if loop == "captured":
            yield from self.rounds.run(self.methods[mode], requests, max_batch_size=batch)
            return
        grouping, rows = (loop if loop in ("eqspec", "exspec") else "ragged"), places(loop, batch)
        scheduler = Scheduler(
            self.target,
            lambda _: self.methods[mode],
            slots=Slots(rows, 4096, grouping),
            device_lane=self.rounds.lane if loop == "server" else None,
        )
        for number, request in enumerate(requests):
            scheduler.submit(Job(number, RequestState.of(request), mode))
        try:
            while not scheduler.is_idle:
                for report in scheduler.round():
                    self.layout_seconds += report.layout_seconds
                    yield from report.progress()
        finally:
            scheduler.close()

    def goodput(self, loop: str, mode: str, batch: int) -> float:
        """Tokens per second from the first token until a place stays empty."""
        requests = self.requests(TURNS * max(places(loop, batch), 2))
        num_left, tokens, began, self.layout_seconds = len(requests), 0, 0.0, 0.0
        self.account = Account(places(loop, batch))
        last = dict[int, float]()
        self.gaps.clear()
        for step in self.steps(loop, mode, requests, batch):
            began = began or time.perf_counter()
            self.account.add(step.report)
            tokens += len(step.new_tokens)
            if step.new_tokens:
                now, name = time.perf_counter(), id(step.state)
                if name in last:
                    self.gaps.append(now - last[name])
                last[name] = now
            num_left -= step.state.is_finished
            if num_left < places(loop, batch):
                break
        seconds = time.perf_counter() - began
        self.layout_share = self.layout_seconds / seconds
        return tokens / seconds

    def static(self, batch: int) -> float:
        """Tokens per second of one batch that begins together, without speculation."""
        params = SamplingParams(max_tokens=96, temperature=self.temperature, ignore_eos=True)
        requests = [Request(self.prompts[number % len(self.prompts)], params) for number in range(batch)]
        tokens, began, end = 0, 0.0, 0.0
        for step in self.rounds.run(self.methods["off"], requests, max_batch_size=batch):
            end = time.perf_counter()
            if began:
                tokens += len(step.new_tokens)
            began = began or end
        return tokens / (end - began)


def of_length(prompt: list[int], count: int | None) -> list[int]:
    """A prompt again and again, until it has so many tokens."""
    return prompt if count is None else (prompt * (count // len(prompt) + 1))[:count]


def places(loop: str, batch: int) -> int:
    """Requests at once."""
    return 3 * batch if loop == "exspec" else batch


def models(numerics: str, draft: str) -> tuple[Target, Target]:
    """The bundled target and a draft like the bundled one, from its folder."""
    target = bundled_path("target")
    if not torch.cuda.is_available():
        return load_model(target), load_model(draft)
    device, found = torch.device("cuda"), list[Target]()
    for folder, shape in ((target, LLAMA_8B), (draft, ONE_LAYER_DRAFT)):
        config, weights = inflated_weights(folder, shape, dtype=torch.bfloat16, device=device)
        decoder = gpu_decoder(config, weights, numerics=numerics)
        assert decoder is not None, "the fast decoder knows Llama"
        found.append(decoder)
    return found[0], found[1]


def measure(bench: Bench, loop: str, batch: int, repeats: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {mode: [] for mode in bench.methods}
    layout, gaps = dict.fromkeys(bench.methods, 0.0), dict.fromkeys(bench.methods, 0.0)
    accounts: dict[str, dict[str, Any]] = {}
    for mode, method in bench.methods.items():  # what is compiled or captured once is no part of it
        if loop == "captured":
            list(bench.rounds.prepare(method, [batch]))
        bench.goodput(loop, mode, batch)
    for repeat in range(repeats):
        modes = list(bench.methods)
        for mode in modes if repeat % 2 else modes[::-1]:
            speeds[mode].append(bench.goodput(loop, mode, batch))
            layout[mode], accounts[mode] = bench.layout_share, bench.account.to_json()
            gaps[mode] = sorted(bench.gaps)[len(bench.gaps) * 99 // 100] / statistics.median(bench.gaps)
    static = [bench.static(batch) for _ in range(3 if loop == "captured" else 0)][1:]
    others = [mode for mode in bench.methods if mode != "off"]
    ratios = {mode: [a / b for a, b in zip(speeds[mode], speeds["off"], strict=True)] for mode in others}
    middle = {mode: statistics.median(values) for mode, values in speeds.items()}
    shown = "  ".join(f"{mode} {middle[mode]:7.0f} ({min(r):.2f} to {max(r):.2f})" for mode, r in ratios.items())
    seconds = time.perf_counter() - bench.began
    print(f"{loop:<9} batch {batch:>3}: off {middle['off']:7.0f} tokens/s  {shown}  [{seconds:.0f} s]", flush=True)
    shown = "  ".join(f"{mode} {gap:.2f}" for mode, gap in gaps.items())
    best = max(middle[mode] for mode in middle if mode != "auto")
    print(f"          auto / best other {middle['auto'] / best:.3f}; 99 % of gaps below, in medians: {shown}; static "
          + ", ".join(f"{speed:.0f}" for speed in static))  # fmt: skip
    if loop in ("eqspec", "exspec"):
        print("          share of the time spent laying rows out:", {mode: round(part, 3) for mode, part in layout.items()})
    print("          rounds without speculation:", accounts["off"], flush=True)
    found = {"loop": loop, "batch": batch, "tokens_per_second": speeds, "layout_share": layout, "gaps": gaps, "static": static}
    return found | {"accounts": accounts}


def row_of(found: dict[str, Any], prompt_tokens: int | None) -> dict[str, Any]:
    """A row of the results file."""
    speeds = {mode: [round(speed, 1) for speed in each] for mode, each in found["tokens_per_second"].items()}
    gaps = {mode: round(gap, 2) for mode, gap in found["gaps"].items()}
    static = [round(speed, 1) for speed in found["static"]]
    row = {"loop": found["loop"], "prompt_tokens": prompt_tokens or "a story's beginning", "batch": found["batch"]}
    return row | {"tokens_per_second": speeds, "gap_p99_in_medians": gaps, "static": static}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    loops = ("captured", "server", "host", "eqspec", "exspec")
    parser.add_argument("--loops", nargs="+", choices=loops, default=loops[:2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--fixed", type=int, nargs="+", default=[4], help="lengths of the fixed modes")
    parser.add_argument("--prompt-tokens", type=int, help="tokens of a prompt (default: a short story's beginning)")
    parser.add_argument("--numerics", default="auto")
    parser.add_argument("--most", type=int, default=6, help="longest draft of the auto mode")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which no further cell begins")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench, results = Bench(arguments), list[dict[str, Any]]()
    for loop in arguments.loops:
        for batch in arguments.batches:
            if not bench.is_over:
                results.append(measure(bench, loop, batch, arguments.repeats))
                if arguments.json:
                    rows = [row_of(each, arguments.prompt_tokens) for each in results]
                    keep_results(arguments.json, WHAT, rows, script="benchmarks/serving_goodput.py")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
