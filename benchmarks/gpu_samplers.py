"""Sampler x method on a GPU: what the complete sampler costs inside captured rounds, on 8B shapes.

    PYTHONPATH=src python benchmarks/gpu_samplers.py [--tokens 128] [--repeats 3] [--json FILE]

The models are the bundled pair in 8B shapes (recipes/inflate.py). For every sampler the methods take turns in one process, each
repeat over the same prompts. A figure is the median of tokens per second and of milliseconds per round, batch 1. ``step`` is a
sampler's milliseconds per round over those of greedy decoding with the same method. The last line is one JSON document. The
line with a grammar measures what masks cost a round. Its matcher is a table of masks; with llguidance installed, a second line
has a real one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]
import torch  # noqa: E402
from gpu import Bench  # noqa: E402  # pyright: ignore

from outrider import SamplingParams  # noqa: E402
from outrider.bench.provenance import keep_results  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.codecs.grammar import GrammarCompiler  # noqa: E402
from outrider.codecs.load import load_codec  # noqa: E402
from outrider.core.request import Request, RequestState  # noqa: E402

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.8": {"temperature": 0.8},
    "T 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T 0.7, top-k 50, repetition 1.1": {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.1},
    "T 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "T 1, typical-p 0.9": {"temperature": 1.0, "typical_p": 0.9},
    "greedy, logprobs 5": {"logprobs": 5},
}


class Thirds:
    """A grammar whose masks are at hand: each token allows another two thirds of the vocabulary."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return (state + token) % 3 if token % 3 != state else None

    def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
        if (state, vocab_size) not in self._masks:
            self._masks[state, vocab_size] = torch.arange(vocab_size) % 3 != state
        return self._masks[state, vocab_size]

    def forced(self, state: int) -> tuple[int, ...]:
        del state
        return ()


def grammars() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"greedy, grammar of a table": {"grammar": Thirds()}}
    if importlib.util.find_spec("llguidance") is not None:
        compiler = GrammarCompiler(load_codec(bundled_path("target")))
        found["greedy, grammar of sentences"] = {"grammar": compiler.regex(SENTENCES)}
    return found


SENTENCES = r"([A-Za-z', \"]+[.!?] ?\n?)+"
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft-model": {"num_draft_tokens": 8},
    "best-first": {"num_draft_tokens": 8, "num_tree_nodes": 63},
}


def measure(bench: Bench, method: Any, options: dict[str, Any], num_tokens: int) -> tuple[float, float, float]:
    """Tokens per second, milliseconds per round, tokens per round."""
    tokens, passes, seconds = 0, 0, 0.0
    for seed, prompt in enumerate(bench.prompts):
        request = Request(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed, **options))
        began, first, state = 0.0, (0, 0), RequestState.of(request)
        for step in bench.rounds["fast"].run(method, [request], max_batch_size=1):
            if not began:  # the first round waits for the prompt and for what is captured once
                began, first = time.perf_counter(), (step.state.num_output, step.state.stats.num_passes)
            state = step.state
        seconds += time.perf_counter() - began
        tokens += state.num_output - first[0]
        passes += state.stats.num_passes - first[1]
    return tokens / seconds, 1e3 * seconds / passes, tokens / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench, results = Bench(context=64), list[dict[str, Any]]()
    what = "sampler x method in captured rounds, 8B shapes, batch 1; step: milliseconds of a round to the greedy one"
    methods = {name: bench.method(name, **options) for name, options in METHODS.items()}
    greedy: dict[str, float] = {}
    for label, options in {**SAMPLERS, **grammars()}.items():
        for name, method in methods.items():
            measure(bench, method, options, 16)
            runs = [measure(bench, method, options, arguments.tokens) for _ in range(arguments.repeats)]
            speed, round_ms, per_round = (statistics.median(column) for column in zip(*runs, strict=True))
            greedy.setdefault(name, round_ms)
            row = {"sampler": label, "method": name, "tokens_per_second": speed, "round_ms": round_ms}
            row |= {"tokens_per_round": per_round, "step": round_ms / greedy[name]}
            results.append(row)
            print(
                f"{label:<32} {name:<12} {speed:7.1f} tokens/s  {round_ms:6.2f} ms a round ({row['step']:.3f}x greedy)  "
                f"{per_round:.2f} tokens a round",
                flush=True,
            )
            if arguments.json:
                keep_results(arguments.json, what, results, script="benchmarks/gpu_samplers.py")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
