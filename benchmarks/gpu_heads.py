"""EAGLE-3 on 8B shapes against plain decoding, batch 1, greedy and at temperature 1, in one process on the same weights.

    PYTHONPATH=src python benchmarks/gpu_heads.py [--json FILE] [--tokens N] [--modes fast invariant] [--shapes TEXT ...]

Target and head are the bundled ones, inflated (recipes/inflate.py, recipes/inflate_head.py): real shapes, a small model's
language. Every round is one captured graph, head included. Prompts are the first 24 tokens of the first twelve held-out
stories, as in ``recipes/heads.py --stage judge``. With ``--mixed`` they are the four stories of benchmarks/gpu.py and the
built-in suite's eight, which are further from what the models were trained on. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "benchmarks")]
from gpu import DEVICE, STORIES, held_out_stories, median_ms, read_prompt  # noqa: E402  # pyright: ignore
from inflate import LLAMA_8B, inflated_weights  # noqa: E402  # pyright: ignore
from inflate_head import inflated_eagle3  # noqa: E402  # pyright: ignore

from outrider import SamplingParams  # noqa: E402
from outrider.bench.suites import load_suites  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.codecs.load import load_codec  # noqa: E402
from outrider.core.method import Method  # noqa: E402
from outrider.core.request import Request, RequestState  # noqa: E402
from outrider.cuda_graphs import Rounds, captured  # noqa: E402
from outrider.drafters.heads.eagle import Eagle  # noqa: E402
from outrider.drafters.heads.head_drafter import HeadOptions  # noqa: E402
from outrider.engine.device_seats import Seat  # noqa: E402
from outrider.methods import compose  # noqa: E402
from outrider.models.gpu.decoder import FastDecoder  # noqa: E402

NUM_PROMPTS, NUM_PROMPT_TOKENS = 12, 24
Shape = tuple[str | None, int, int]
SHAPES: dict[str, Shape] = {
    "chain of 5": ("1,1,1,1,1", 5, 5),
    "tree 4,2,1,1,1 (36 cut to 28)": ("4,2,1,1,1", 5, 28),
    "best-first, 5 levels, 63 nodes": (None, 5, 63),
    "best-first, 6 levels, 31 nodes": (None, 6, 31),
    "best-first, 6 levels, 63 nodes": (None, 6, 63),
    "best-first, 8 levels, 63 nodes": (None, 8, 63),
}
"""Branching (None: best-first), depth, guesses."""


class Bench:
    """The models and what was measured."""

    def __init__(self, *, is_mixed: bool) -> None:
        config, weights = inflated_weights(bundled_path("target"), LLAMA_8B, dtype=torch.bfloat16, device=DEVICE)
        self.head = inflated_eagle3(LLAMA_8B, weights.embedding, dtype=torch.bfloat16, device=DEVICE)
        self.targets = {mode: FastDecoder(config, weights, numerics=mode) for mode in ("fast", "invariant")}
        self.rounds = {mode: Rounds(target) for mode, target in self.targets.items()}
        codec = load_codec(bundled_path("target"))
        (suite,) = load_suites(["stories"])
        texts = [codec.encode(text)[:NUM_PROMPT_TOKENS] for text in held_out_stories()[:NUM_PROMPTS]]
        mixed = [codec.encode(text) for text in (*STORIES, *(item.text or "" for item in suite.items))]
        self.prompts = mixed if is_mixed else texts
        self.results: dict[str, Any] = {}

    def method(self, mode: str, shape: Shape | None) -> Method:
        plain = compose("plain", self.targets[mode], policy="fixed")
        if shape is None:
            return plain
        branching, depth, nodes = shape
        options = {"num_draft_tokens": depth, "num_tree_nodes": nodes}
        planned = compose("token-recycling", self.targets[mode], policy="fixed", options=options)
        return Method(Eagle(self.head, HeadOptions(branching=branching)), plain.rule, planned.policy)

    def run(
        self, method: Method, mode: str, num_tokens: int, temperature: float, *, prompts: int | None = None
    ) -> list[RequestState]:
        requests = [
            Request(prompt, SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=5, ignore_eos=True))
            for prompt in self.prompts[:prompts]
        ]
        steps = self.rounds[mode].run(method, requests, max_batch_size=1)
        done = {step.request: step.state for step in steps if step.state.is_finished}
        return [done[index] for index in range(len(requests))]

    def measure(self, num_tokens: int, modes: Sequence[str], shapes: Mapping[str, Shape]) -> None:
        """One table: every shape, both temperatures."""
        print(f"{'batch 1':<52}{'T':>4}{'tok/s':>9}{'ms/round':>9}{'draft':>7}{'tok/round':>10}{'to plain':>9}   same text")
        for mode in modes:
            for temperature in (0.0, 1.0):
                self._rows(mode, temperature, num_tokens, shapes)

    def _rows(self, mode: str, temperature: float, num_tokens: int, shapes: Mapping[str, Shape]) -> None:
        base, texts = 0.0, list[list[int]]()
        for label, shape in {"plain": None, **shapes}.items():
            method = self.method(mode, shape)
            self.run(method, mode, 24, temperature, prompts=1)  # captures
            states = self.run(method, mode, num_tokens, temperature)
            tokens, seconds = sum(s.stats.num_tokens for s in states), sum(s.stats.seconds for s in states)
            rounds, speed = sum(s.stats.num_passes for s in states), tokens / seconds
            draft = 0.0 if shape is None else self.draft_ms(method, mode)
            found = [s.output_ids for s in states]
            base, texts = base or speed, texts or found
            same = sum(a == b for a, b in zip(texts, found, strict=True))
            self.results[f"{mode}/{temperature}/{label}"] = {
                "tokens_per_second": speed, "ms_per_round": seconds / rounds * 1e3, "tokens_per_round": tokens / rounds,
                "to_plain": speed / base, "same": same, "draft_ms": draft,
            }  # fmt: skip
            row = f"{speed:>9.1f}{seconds / rounds * 1e3:>9.3f}{draft:>7.3f}{tokens / rounds:>10.2f}{speed / base:>8.2f}x"
            print(f"{mode + ', ' + label:<52}{temperature:>4.1f}{row}   {same}/{len(texts)}", flush=True)

    def draft_ms(self, method: Method, mode: str) -> float:
        """Milliseconds of the head's part of a round, as a graph of its own."""
        graphs = captured(method, self.targets[mode])
        assert graphs is not None and graphs.drafter is not None
        state = RequestState.of(Request(self.prompts[0], SamplingParams(max_tokens=64)))
        frame = graphs.frame(1)
        nodes = torch.zeros(1, graphs.num_nodes(graphs.most_guesses), dtype=torch.int64, device=DEVICE)
        with torch.inference_mode():
            graphs.seat(1, {0: Seat(0, state, read_prompt(graphs.target, self.prompts[0]))})
            graphs.start(1, {0: state})
            graphs.drafter.propose(frame, nodes, graphs.most_guesses)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graphs.drafter.propose(frame, nodes, graphs.most_guesses)
            found = median_ms(graph.replay)
        graphs.leave(1)
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--modes", nargs="+", default=["fast", "invariant"])
    parser.add_argument("--shapes", nargs="+", default=[""], help="only those whose names contain one of these")
    parser.add_argument("--mixed", action="store_true", help="other prompts")
    arguments = parser.parse_args()
    bench = Bench(is_mixed=arguments.mixed)
    shapes = {label: shape for label, shape in SHAPES.items() if any(text in label for text in arguments.shapes)}
    bench.measure(arguments.tokens, arguments.modes, shapes)
    document = {"date": str(date.today()), "device": torch.cuda.get_device_name(), "results": bench.results}
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
