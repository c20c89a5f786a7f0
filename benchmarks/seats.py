"""Tokens per second of trained heads under the default policy, by the number of seats, beside plain decoding.

    PYTHONPATH=src python benchmarks/seats.py --heads build/field/blocks/heads [--kinds dspark,dflash] [--seats 1,16,64]

All methods answer the same prompts in turns, in one process; the figure is the median over rounds of the tokens of all answers
over the seconds they took, prompts included. The first round is not counted: graphs are captured, kernels compiled, prices
learned. *Fixed* drafts chains of four whatever they cost. Greedy; texts are compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.core.method import Method
from outrider.core.params import SamplingParams

STORIES = Path(__file__).parent / "held_out_stories.jsonl"
CHAIN: dict[str, Any] = {"branching": "chain", "num_draft_tokens": 4, "num_tree_nodes": 4}


def prompts_of(llm: LLM, count: int) -> list[list[int]]:
    """Pieces of 24 tokens of the held-out stories, as many as are wanted."""
    stories = [llm.codec.encode(json.loads(line)["text"]) for line in STORIES.read_text(encoding="utf-8").splitlines()]
    pieces = [story[begin : begin + 24] for begin in range(0, 240, 24) for story in stories]
    return [piece for piece in pieces if len(piece) == 24][:count]


def measure(llm: LLM, methods: dict[str, Method], seats: int, *, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every method at one number of seats."""
    prompts = prompts_of(llm, max(8, seats))
    params, speeds = SamplingParams(max_tokens=num_tokens, ignore_eos=True), {name: list[float]() for name in methods}
    plain, rows = list[list[int]](), dict[str, dict[str, Any]]()
    llm.max_batch_size = seats
    for turn in range(rounds + 1):
        for name, method in methods.items():
            began = time.perf_counter()
            outs = llm.generate(prompts, params, method=method)
            seconds, texts = time.perf_counter() - began, [list(out.token_ids) for out in outs]
            plain = plain or texts
            counts = {key: sum(vars(out.stats)[key] for out in outs) for key in ("num_tokens", "num_passes", "num_drafted")}
            speeds[name] += [counts["num_tokens"] / seconds] if turn else []
            rows[name] = {
                "tokens_per_pass": round(counts["num_tokens"] / counts["num_passes"], 3),
                "guesses_per_pass": round(counts["num_drafted"] / counts["num_passes"], 3),
                "same_text": sum(a == b for a, b in zip(plain, texts, strict=True)),
                "texts": len(texts),
            }
    found = {name: statistics.median(values) for name, values in speeds.items()}
    best = {name: [round(found[name], 1), round(found[name] / found["plain"], 3)] for name in methods}
    return [
        {"seats": seats, "method": name, "tokens_per_second": speed, "to_plain": ratio, **rows[name]}
        for name, (speed, ratio) in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=Path, required=True, help="folder with a folder for each kind")
    parser.add_argument("--kinds", default="dspark,dflash,p-eagle,eagle3")
    parser.add_argument("--seats", default="1,16,64")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    llm = LLM(bundled_path("target"), method="plain")
    methods: dict[str, Method] = {"plain": llm.compose("plain")}
    for kind in arguments.kinds.split(","):
        folder = str(arguments.heads / kind)
        methods[f"{kind}, default policy"] = llm.compose(kind, heads=folder, **CHAIN, policy="adaptive")
        methods[f"{kind}, fixed"] = llm.compose(kind, heads=folder, **CHAIN, policy="fixed")
    rows = list[dict[str, Any]]()
    for seats in map(int, arguments.seats.split(",")):
        for row in measure(llm, methods, seats, num_tokens=arguments.tokens, rounds=arguments.rounds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.json:
        what = "tokens per second of the bundled target with trained heads, default policy and fixed chains of four, by seats"
        head = results_head(what, script="benchmarks/seats.py")
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
