"""Tokens per target pass of the drafters that guess from the target's own scores, on story prompts.

    python benchmarks/parallel_guessing.py                                    # the bundled target, greedy and temperature 1
    python benchmarks/parallel_guessing.py --model stories15M --prompts 12    # another model, by folder
    python benchmarks/parallel_guessing.py --ranks --prompts 20               # how often each rank of a successor is right

Every method is compared with plain decoding in the same process: the texts must be equal (float32), seed for seed. Tokens per
pass do not depend on the machine; seconds do, and are printed for orientation only. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outrider import LLM, Method, SamplingParams
from outrider.api import RequestOutput
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.drafters.itself.token_recycling import TokenRecycling

NAMES = ("Tom", "Lily", "Ben", "Mia", "Sam", "Anna", "Max", "Sue", "Tim", "Jack")
ANIMALS = ("cat", "dog", "bird", "bear", "frog", "rabbit", "fish", "mouse", "duck", "fox")
OPENINGS = (
    "Once upon a time, there was a {a} named {n}. {n}",
    "One day, {n} went to the park with a {a}.",
    "{n} had a little {a}. The {a} liked to",
    "There was a big {a} in the forest. {n} saw it and",
    "{n} and the {a} were best friends. They",
)
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("prompt-lookup", {}),
    ("jacobi", {}),
    ("lookahead", {"window": 7, "max_guesses": 7}),
    ("lookahead", {}),
    ("token-recycling", {"grow": "ranks", "num_successors": 8, "num_tree_nodes": 8}),
    ("token-recycling", {"grow": "ranks", "num_successors": 8, "num_tree_nodes": 32}),
    ("token-recycling", {"grow": "ranks", "num_successors": 8, "num_tree_nodes": 80}),
    ("token-recycling", {"grow": "ranks", "perturb": False, "num_tree_nodes": 64}),
    ("token-recycling", {"grow": "ranks", "num_tree_nodes": 64}),
    ("token-recycling", {"perturb": False, "num_tree_nodes": 64}),
    ("token-recycling", {"num_tree_nodes": 16}),
    ("token-recycling", {"num_tree_nodes": 64}),
)


def prompts(count: int) -> list[str]:
    source = random.Random(5)
    return [source.choice(OPENINGS).format(a=source.choice(ANIMALS), n=source.choice(NAMES)) for _ in range(count)]


def params(count: int, temperature: float, max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=100 + i, ignore_eos=True) for i in range(count)]


def row_of(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> dict[str, Any]:
    passes = sum(output.stats.num_passes for output in outputs)
    return {
        "tokens_per_pass": round(sum(output.stats.num_tokens for output in outputs) / passes, 3),
        "guesses_per_pass": round(sum(output.stats.num_drafted for output in outputs) / passes, 1),
        "draft_ms": round(1e3 * sum(output.stats.draft_seconds for output in outputs) / passes, 2),
        "score_ms": round(1e3 * sum(output.stats.score_seconds for output in outputs) / passes, 2),
        "equal": [a.token_ids for a in outputs] == [b.token_ids for b in expected],
    }


def compare(llm: LLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    texts, found = prompts(arguments.prompts), []
    for temperature in arguments.temperatures:
        requests = params(len(texts), temperature, arguments.max_tokens)
        plain = llm.generate(texts, requests)
        for name, options in (("plain", {}), *CASES):
            outputs = llm.generate(texts, requests, method=llm.compose(name, **options))
            row = {"temperature": temperature, "method": name, "options": options, **row_of(outputs, plain)}
            found.append(row)
            words = " ".join(f"{key}={value}" for key, value in options.items())
            times = f"{row['draft_ms']:7.2f} ms draft {row['score_ms']:7.2f} ms score"
            print(f"T={temperature} {name:<16}{words:<52}{row['tokens_per_pass']:6.3f} tokens per pass {times}  {row['equal']}")
    return found


@final
class Watched(Drafter):
    """Token recycling that notes, before it learns from a round, what the table would have said at every accepted node."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC

    def __init__(self, inner: TokenRecycling) -> None:
        self.inner, self.taps = inner, inner.taps
        self.chances: list[Tensor] = []
        """[k] stored probabilities of the successors of each node."""
        self.hits: list[Tensor] = []
        """[k] which of them the target chose (greedily)."""

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Any:
        return self.inner.start(rows, taps)

    def propose(self, state: Any, context: Context, plan: Plan) -> Draft:
        return self.inner.propose(state, context, plan)

    def observe(self, state: Any, observation: Observation) -> None:
        table, tree = self.inner.table, observation.draft.tree
        for row, path in enumerate(observation.paths):
            for node in path:
                token = int(tree.tokens[row, node])
                if table.ids[token, 0] >= 0:
                    self.chances.append(table.logits[token].softmax(-1))
                    self.hits.append(table.ids[token] == observation.scores.logits[row, node].argmax())
        self.inner.observe(state, observation)


def ranks(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """How often the target's choice is a token's r-th successor, and how often when it was stored with probability p."""
    inner = llm.compose("token-recycling", grow="ranks", num_tree_nodes=80)
    assert isinstance(inner.drafter, TokenRecycling)
    watched = Watched(inner.drafter)
    texts = prompts(arguments.prompts)
    requests = params(len(texts), 0.0, arguments.max_tokens)
    llm.generate(texts, requests, method=Method(watched, inner.rule, inner.policy))
    chances, hits = torch.stack(watched.chances), torch.stack(watched.hits).float()
    found: dict[str, Any] = {"num_nodes": len(hits), "by_rank": [round(rate, 4) for rate in hits.mean(0).tolist()]}
    print("by rank", found["by_rank"])
    for rank in (0, 1, 2, 5):
        for low, high in itertools.pairwise((0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.01)):
            inside = (chances[:, rank] >= low) & (chances[:, rank] < high)
            if int(inside.sum()) >= 50:
                stored, right = float(chances[inside, rank].mean()), float(hits[inside, rank].mean())
                fitted = 0.65 * stored + 0.04 / (1 + rank)
                found[f"rank {rank} p {stored:.3f}"] = round(right, 3)
                print(f"rank {rank} stored {stored:.3f} right {right:.3f} fitted {fitted:.3f} ({int(inside.sum())} nodes)")
    return found


def report(name: str, arguments: argparse.Namespace, **measurements: Callable[[LLM, argparse.Namespace], Any]) -> None:
    """Measure on one thread and print one JSON document."""
    torch.set_num_threads(1)
    llm = LLM(arguments.model, method="plain", dtype="float32", max_batch_size=1)
    result: dict[str, Any] = {"benchmark": name, "arguments": vars(arguments)}
    result["where"] = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps(result | {key: measure(llm, arguments) for key, measure in measurements.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a hub name or a GGUF file; the bundled target if not given")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--ranks", action="store_true", help="measure rank acceptance instead")
    arguments = parser.parse_args()
    report("parallel_guessing", arguments, **({"ranks": ranks} if arguments.ranks else {"methods": compare}))


if __name__ == "__main__":
    main()
