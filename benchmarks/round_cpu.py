"""What the parts of one round cost on a CPU: the pass, and everything between two passes.

    PYTHONPATH=src python benchmarks/round_cpu.py [--max-tokens 100] [--repeats 3] [--out benchmarks/results/round_cpu.json]

The bundled target, one request, one thread, greedy. Times are CPU microseconds of the thread. They are means over the rounds
with guesses, without the slowest tenth. Methods take turns, and the least of all repeats counts. Parts are told apart by clocks
around the calls of ``Engine.step``, which cost about a microsecond each. ``loop`` is what passes between two rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.core.method import Method
from outrider.core.sampling import Sampler
from outrider.engine.step import Engine

PROMPTS = ("Once upon a time", "Lily and Ben went to the park", "The dog was sad because")
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft-model": {"num_draft_tokens": 4},
    "suffix": {"num_draft_tokens": 4},
    "prompt-lookup": {"num_draft_tokens": 4},
    "ngram-cache": {"num_draft_tokens": 4},
    "token-recycling": {"num_draft_tokens": 3, "num_tree_nodes": 4},
    "eagle3": {"num_draft_tokens": 3, "num_tree_nodes": 3},
    "medusa": {"num_draft_tokens": 3, "num_tree_nodes": 3},
    "hydra": {"num_draft_tokens": 3, "num_tree_nodes": 3},
}
PARTS = ("pass", "draft", "sampler", "walk", "commit", "observe", "policy", "emit", "rest", "loop")


class Clocks:
    """Seconds of each part of the round that runs, and of all rounds before it."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.rounds: list[dict[str, float]] = []
        self._inner = 0.0
        """Seconds that the calls inside the one that runs have counted themselves."""

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work``, with its own time counted as ``part``: what is timed inside it is not counted twice."""

        def call(*given: Any, **named: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            began = time.thread_time()
            try:
                return work(*given, **named)
            finally:
                spent = time.thread_time() - began
                self.now[part] += spent - self._inner
                self._inner = outer + spent

        return call

    def ended(self, has_guesses: bool) -> None:
        if has_guesses:
            self.rounds.append(self.now)
        self.now = defaultdict(float)

    def means(self) -> dict[str, float]:
        """Microseconds of every part, without the slowest tenth of the rounds."""
        kept = sorted(self.rounds, key=lambda parts: sum(parts.values()))[: max(1, len(self.rounds) * 9 // 10)]
        return {part: 1e6 * sum(parts[part] for parts in kept) / len(kept) for part in PARTS}


@contextmanager
def watched(llm: LLM, method: Method, clocks: Clocks) -> Iterator[None]:
    """Clocks around the parts of every round."""
    parts = [
        (type(llm.target), "score", "pass"), (type(method.drafter), "asked", "draft"), (Sampler, "law_of", "sampler"),
        (Sampler, "_chosen", "sampler"), (type(method.rule), "walk", "walk"),
        (type(method.drafter), "observe", "observe"), (type(method.policy), "plan", "policy"),
        (type(method.policy), "update", "policy"), (Engine, "_emit", "emit"), (Engine, "_step", "rest"),
    ]  # fmt: skip
    cache = type(llm.target.new_cache(1))
    with ExitStack() as stack:
        for owner, name, part in (*parts, (cache, "commit", "commit")):
            stack.enter_context(patch.object(owner, name, clocks.timed(part, getattr(owner, name))))
        yield


def run_once(llm: LLM, method: Method, params: SamplingParams, *, is_plain: bool) -> tuple[dict[str, float], float]:
    """The parts of a round, and tokens per round with guesses."""
    clocks, tokens = Clocks(), 0
    with watched(llm, method, clocks):
        for prompt in PROMPTS:
            last = time.thread_time()
            for progress in llm.steps(llm.requests(prompt, params), method=method):
                report = progress.report
                now = time.thread_time()
                clocks.now["loop"] = max(0.0, now - last - sum(clocks.now.values()))
                has_guesses = is_plain or bool(sum(report.drafted))
                clocks.ended(has_guesses)
                tokens += report.num_tokens if has_guesses else 0
                last = time.thread_time()
    return clocks.means(), tokens / len(clocks.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    llm, params = LLM(dtype=arguments.dtype), SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
    methods = {name: llm.compose(name, **numbers) for name, numbers in METHODS.items()}
    methods["draft-model, default policy"] = llm.compose("draft-model")
    found: dict[str, tuple[dict[str, float], float]] = {}
    for _ in range(arguments.repeats):
        for name, method in methods.items():
            new = run_once(llm, method, params, is_plain=name == "plain")
            if name not in found or sum(new[0].values()) < sum(found[name][0].values()):
                found[name] = new
    rows: list[dict[str, Any]] = []
    for name, (parts, tokens) in found.items():
        total = sum(parts.values())
        between = 1 - parts["pass"] / total
        whole = {part: round(parts[part]) for part in PARTS}
        rows.append(
            {"method": name, **whole, "round": round(total), "tokens": round(tokens, 2), "not the pass": round(between, 3)}
        )
    what = f"CPU microseconds of the parts of a round, bundled target, {arguments.dtype}, one request, one thread, greedy"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/round_cpu.py")))


if __name__ == "__main__":
    main()
