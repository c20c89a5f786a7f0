"""Memory of keys on a GPU when one text is long and many are short: 15,000 tokens, then 64 prompts of 1,000.

    PYTHONPATH=src python benchmarks/gpu_pages.py [--out FILE]

The models are the bundled pair in 8B shapes (recipes/inflate.py). Keys live in pages of one pool, which is made once and
must not move: rounds captured before the long text came serve it too. Reported are the pages that requests held at most, in
bytes, the rounds that were captured after the warm-up, and tokens per second. Then 16 requests of each sampler come, and again
the captured rounds are counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "benchmarks")]
from serving_goodput import STORIES, models, of_length  # noqa: E402  # pyright: ignore

from outrider import SamplingParams  # noqa: E402
from outrider.bench.provenance import keep_results  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.codecs.load import load_codec  # noqa: E402
from outrider.core.request import Request  # noqa: E402
from outrider.cuda_graphs import Rounds  # noqa: E402
from outrider.engine.round_graph import RoundGraph  # noqa: E402
from outrider.methods import compose  # noqa: E402
from outrider.models.gpu.decoder import FastDecoder  # noqa: E402

LONG, SHORT, COUNT, NEW = 15_000, 1_000, 64, 64
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy choices": {},
    "a temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "typical-p": {"temperature": 0.8, "typical_p": 0.9},
    "penalties": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}


def counted() -> list[int]:
    """Grows by one with every round that is captured from now on."""
    made, capture = list[int](), RoundGraph.__init__

    def count(self: RoundGraph, *args: Any, **named: Any) -> None:
        capture(self, *args, **named)
        made.append(1)

    RoundGraph.__init__ = count
    return made


def measure(rounds: Rounds, target: FastDecoder, name: str, options: dict[str, Any], captures: list[int]) -> dict[str, Any]:
    method = compose(name, target, **options)
    codec, params = load_codec(bundled_path("target")), SamplingParams(max_tokens=NEW, ignore_eos=True)
    story = codec.encode(STORIES[0])
    for size in (COUNT, 1):
        list(rounds.prepare(method, [size]))
    before, held, tokens, began = len(captures), 0, 0, time.perf_counter()
    for count, length in ((1, LONG), (COUNT, SHORT)):
        requests = [Request(of_length([1 + number, *story], length), params) for number in range(count)]
        for step in rounds.run(method, requests, max_batch_size=COUNT):
            held, tokens = max(held, target.pool.num_used), tokens + len(step.new_tokens)
    torch.cuda.synchronize()
    row = {
        "method": name,
        "gigabytes held at most": held * target.pool.page_bytes / 1e9,
        "gigabytes of the pool": target.pool.block.nbytes / 1e9,
        "rounds captured after the warm-up": len(captures) - before,
        "tokens per second": tokens / (time.perf_counter() - began),
    }
    print(row, flush=True)
    return row


def count_samplers(rounds: Rounds, target: FastDecoder, captures: list[int]) -> dict[str, Any]:
    """Rounds captured after a warm-up for requests of every sampler, and seconds of the warm-up."""
    method, story = compose("plain", target), load_codec(bundled_path("target")).encode(STORIES[0])
    began = time.perf_counter()
    for size in (16, 8, 4, 2, 1):
        list(rounds.prepare(method, [size]))
    row: dict[str, Any] = {"method": "plain, 16 requests of each sampler", "warm-up seconds": time.perf_counter() - began}
    for name, more in SAMPLERS.items():
        before, params = len(captures), SamplingParams(max_tokens=NEW, ignore_eos=True, seed=1, **more)
        list(rounds.run(method, [Request([1 + number, *story], params) for number in range(16)], max_batch_size=16))
        row[f"rounds captured for {name}"] = len(captures) - before
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    target, draft = models("auto", bundled_path("draft"))
    assert isinstance(target, FastDecoder), "needs a GPU"
    captures, rounds = counted(), Rounds(target)
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plain", {}),
        ("draft-model", {"draft": draft, "options": {"num_draft_tokens": 4}}),
    )
    rows = [measure(rounds, target, name, options, captures) for name, options in kinds]
    rows.append(count_samplers(rounds, target, captures))
    what = "the bundled pair in 8B shapes: one prompt of 15,000 tokens, then 64 prompts of 1,000, 64 new tokens each"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/gpu_pages.py")))


if __name__ == "__main__":
    main()
