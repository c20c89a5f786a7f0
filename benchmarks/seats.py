"""Tokens per second of trained heads under the default policy, by the number of seats, beside plain decoding.

    PYTHONPATH=src python benchmarks/seats.py --heads build/field/blocks/heads [--kinds dspark,dflash] [--seats 1,16,64]
    PYTHONPATH=src python benchmarks/seats.py --heads build/field/blocks/heads --inflated --kinds dspark,dflash,eagle3

All methods answer the same prompts in turns, in one process. The figure is the median over rounds of the tokens of all answers
over the seconds they took, prompts included. On a CPU these are seconds of the processor, of one thread, because other work may
run beside. On a GPU rounds are captured beforehand, and the first turn is not counted: kernels are
compiled, prices learned. Beside it stands how long the host took to seat the texts, of all turns the shortest. *Fixed* drafts
chains of four whatever they cost. Greedy; texts are compared with plain decoding's. ``--inflated`` runs target and heads in the
shapes of Llama-3-8B, on a GPU (recipes/inflate.py: real shapes, the bundled model's text).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.codecs.load import load_codec
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.cuda_graphs import Rounds
from outrider.drafters.heads.dflash import Dflash
from outrider.drafters.heads.dspark import Dspark
from outrider.drafters.heads.eagle import Eagle
from outrider.drafters.heads.head_options import HeadOptions
from outrider.methods import compose
from outrider.models.load import load_model

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
STORIES = Path(__file__).parent / "held_out_stories.jsonl"
LENGTH: dict[str, Any] = {"num_draft_tokens": 4, "num_tree_nodes": 4}
POLICIES = {"default policy": "adaptive", "fixed": "fixed"}


@dataclass(frozen=True, eq=False)
class Bench:
    """A target, and the methods that are compared on it."""

    target: Target
    methods: dict[str, Method]
    rounds: Rounds

    @staticmethod
    def bundled(heads: Path, kinds: Sequence[str]) -> Bench:
        target = load_model(bundled_path("target"))
        methods = {"plain": compose("plain", target)}
        for kind in kinds:
            for label, policy in POLICIES.items():
                options = {"heads": str(heads / kind), "branching": "chain", **LENGTH}
                methods[f"{kind}, {label}"] = compose(kind, target, policy=policy, options=options)
        return Bench(target, methods, Rounds(target))

    @staticmethod
    def inflated(heads: Path, kinds: Sequence[str]) -> Bench:
        from inflate import LLAMA_8B, inflated_weights  # pyright: ignore[reportMissingImports]
        from inflate_block import inflated_block  # pyright: ignore[reportMissingImports]
        from inflate_head import inflated_eagle3  # pyright: ignore[reportMissingImports]

        from outrider.models.gpu.decoder import FastDecoder

        place: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
        config, weights = inflated_weights(bundled_path("target"), LLAMA_8B, **place)
        target, chain = FastDecoder(config, weights, numerics="invariant"), HeadOptions(branching="chain")
        plain = compose("plain", target)
        methods, ends = {"plain": plain}, (weights.embedding, weights.head)
        for kind in kinds:
            folder = str(heads / kind)
            if kind == "eagle3":
                drafter = Eagle(inflated_eagle3(LLAMA_8B, weights.embedding, folder=folder, **place), chain)
            else:
                head = inflated_block(folder, LLAMA_8B, ends, **place)
                drafter = Dspark(head, chain) if kind == "dspark" else Dflash(head, chain)
            for label, policy in POLICIES.items():
                planned = compose("token-recycling", target, policy=policy, options=LENGTH)
                methods[f"{kind}, {label}"] = Method(drafter, plain.rule, planned.policy)
        return Bench(target, methods, Rounds(target))

    def answers(self, name: str, prompts: list[list[int]], params: SamplingParams, seats: int) -> list[RequestState]:
        requests = [Request(prompt, params) for prompt in prompts]
        steps = self.rounds.run(self.methods[name], requests, max_batch_size=seats)
        done = {step.request: step.state for step in steps if step.state.is_finished}
        return [done[index] for index in range(len(prompts))]


@contextmanager
def seating_seconds() -> Iterator[list[float]]:
    """Seconds the host spends on seating, one entry for each group of texts."""
    taken = list[float]()
    if not torch.cuda.is_available():
        yield taken
        return
    from outrider.engine.captured_rounds import RoundGraphs  # needs triton

    seat = RoundGraphs.seat

    def timed(*given: Any) -> None:
        began = time.perf_counter()
        seat(*given)
        taken.append(time.perf_counter() - began)

    with patch.object(RoundGraphs, "seat", timed):
        yield taken


def prompts_of(count: int) -> list[list[int]]:
    """Pieces of 24 tokens of the held-out stories, as many as are wanted."""
    codec = load_codec(bundled_path("target"))
    stories = [codec.encode(json.loads(line)["text"]) for line in STORIES.read_text(encoding="utf-8").splitlines()]
    pieces = [story[begin : begin + 24] for begin in range(0, 240, 24) for story in stories]
    return [piece for piece in pieces if len(piece) == 24][:count]


def measure(bench: Bench, seats: int, *, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every method at one number of seats."""
    prompts = prompts_of(max(4, seats))
    params, speeds = SamplingParams(max_tokens=num_tokens, ignore_eos=True), {name: list[float]() for name in bench.methods}
    plain, rows = list[list[int]](), dict[str, dict[str, Any]]()
    seating = dict.fromkeys(bench.methods, math.inf)
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    for method in bench.methods.values():
        list(bench.rounds.prepare(method, [seats], comes_at_once=True))
    for turn in range(rounds + 1):
        for name in bench.methods:
            began = clock()
            with seating_seconds() as taken:
                states = bench.answers(name, prompts, params, seats)
            seconds, texts = clock() - began, [list(state.output_ids) for state in states]
            seating[name] = min(seating[name], sum(taken))
            plain = plain or texts
            counts = {key: sum(vars(s.stats)[key] for s in states) for key in ("num_tokens", "num_passes", "num_drafted")}
            speeds[name] += [counts["num_tokens"] / seconds] if turn else []
            rows[name] = {
                "tokens_per_pass": round(counts["num_tokens"] / counts["num_passes"], 3),
                "guesses_per_pass": round(counts["num_drafted"] / counts["num_passes"], 3),
                "seating_ms": round(1e3 * seating[name], 2),
                "same_text": sum(a == b for a, b in zip(plain, texts, strict=True)),
                "texts": len(texts),
            }
    found = {name: statistics.median(values) for name, values in speeds.items()}
    return [
        {"seats": seats, "method": name, "tokens_per_second": round(speed, 1), "to_plain": round(speed / found["plain"], 3)}
        | rows[name]
        for name, speed in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=Path, required=True, help="folder with a folder for each kind")
    parser.add_argument("--kinds", default="dspark,dflash,p-eagle,eagle3")
    parser.add_argument("--inflated", action="store_true", help="in 8B shapes, on a GPU; not p-eagle")
    parser.add_argument("--seats", default="1,16,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    make, shapes = (Bench.inflated, "8B shapes") if arguments.inflated else (Bench.bundled, "its own shapes")
    bench, rows = make(arguments.heads, arguments.kinds.split(",")), list[dict[str, Any]]()
    what = f"tokens per second of the bundled target in {shapes} with trained heads, default policy and fixed chains of four"
    for seats in map(int, arguments.seats.split(",")):
        for row in measure(bench, seats, num_tokens=arguments.tokens, rounds=arguments.rounds):
            rows.append(row)
            print(json.dumps(row), flush=True)
        if arguments.json:
            document = {**results_head(what, script="benchmarks/seats.py"), "rows": rows}
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
