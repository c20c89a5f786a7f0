"""How fast, on this machine, against strong baselines in the same process.

Takes turns: transformers' own `generate`, our plain decoding, our methods; same weights, same prompts, same number of new
tokens, greedy, end of sequence ignored. Prints medians of decode speed with their spread over the rounds, the fraction of the
memory floor, and the ratios; the last line of stdout is one JSON document.

    python recipes/speed.py                          # the bundled pair
    python recipes/speed.py --model DIR --draft DIR --dtype float32
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path

PROMPTS = (
    "Once upon a time, there was a little fox who",
    "Tom and Lily went to the park. They saw a big",
    "One day, a girl named Mia found a red ball in the garden. She",
    "The old man had a small boat. Every morning he",
)


@dataclass
class Series:
    """Decode speeds of one engine, one figure per round."""

    name: str
    run: Callable[[list[int], int], tuple[int, float]]
    """(prompt, new tokens) -> (tokens emitted, seconds)"""
    speeds: list[float] = field(default_factory=list)

    def measure(self, prompts: list[list[int]], num_tokens: int) -> None:
        tokens, seconds = 0, 0.0
        for prompt in prompts:
            emitted, took = self.run(prompt, num_tokens)
            tokens, seconds = tokens + emitted, seconds + took
        self.speeds.append(tokens / seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.speeds)

    def row(self, baseline: float) -> str:
        low, high = min(self.speeds), max(self.speeds)
        return f"{self.name:<28}{self.median:>9.1f}  ({low:.1f} - {high:.1f}){self.median / baseline:>9.2f}x"


def ours(llm: LLM, name: str, **options: Any) -> Callable[[list[int], int], tuple[int, float]]:
    method = llm.compose(name, **options)

    def run(prompt: list[int], num_tokens: int) -> tuple[int, float]:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        stats = llm.generate(prompt, params, method=method)[0].stats
        return stats.num_tokens, stats.seconds

    return run


def transformers_generate(folder: str, dtype: torch.dtype) -> Callable[[list[int], int], tuple[int, float]]:
    """transformers' greedy `generate`; prefill is measured by a one-token call and taken off."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def call(prompt: list[int], count: int) -> float:
        began = time.perf_counter()
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - began

    def run(prompt: list[int], num_tokens: int) -> tuple[int, float]:
        first = call(prompt, 1)
        return num_tokens - 1, call(prompt, num_tokens) - first

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=bundled_path("target"))
    parser.add_argument("--draft", default=bundled_path("draft"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-K", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--no-transformers", action="store_true")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, method="draft-model", draft=arguments.draft, dtype=arguments.dtype)
    dtype = llm.target.dtype
    prompts = [llm.codec.encode(prompt) for prompt in PROMPTS]
    series = [Series("plain", ours(llm, "plain"))]
    series += [Series(f"draft-model K={k}", ours(llm, "draft-model", num_draft_tokens=k)) for k in arguments.K]
    series += [Series("prompt-lookup", ours(llm, "prompt-lookup"))]
    if not arguments.no_transformers:
        series += [Series("transformers generate", transformers_generate(arguments.model, dtype))]
    for one in series:  # warm-up
        one.run(prompts[0], arguments.tokens)
    for _ in range(arguments.rounds):
        for one in series:
            one.measure(prompts, arguments.tokens)
    report(series, dtype, arguments)


def report(series: list[Series], dtype: torch.dtype, arguments: argparse.Namespace) -> None:
    plain = series[0].median
    print(f"{'decode, batch 1, greedy':<28}{'tokens/s':>9}  (spread){'to plain':>15}")
    for one in series:
        print(one.row(plain))
    document = {
        "date": date.today().isoformat(),
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "dtype": str(dtype),
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "speeds": {one.name: {"median": one.median, "all": one.speeds} for one in series},
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
