"""How far each multi-draft rule is from the optimum of k independent guesses, on vocabularies small enough for the program.

The optimum is a linear program (SpecTr, arXiv 2310.15141): every tuple of k draws sends its probability to tokens in it, a
token takes at most p. Solved as a flow, it is the oracle. The rules are run through every branch of chance, so their figures
are exact as well. Prints a table and, as its last line, one JSON document.

    python benchmarks/transport_oracle.py [--vocab 4] [--guesses 2,3] [--pairs 20]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence

import networkx
import torch
from torch import Tensor

from outrider.acceptance import KSeq, Recursive, Transport
from outrider.core.draft import Draws
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource, enumerate_law

RULES: dict[str, AcceptanceRule] = {"recursive": Recursive(), "kseq": KSeq(), "transport": Transport()}
_DRAFT_LANE = 1_000_000


def optimum(p: Tensor, q: Tensor, count: int) -> float:
    """The most that any lossless rule accepts of ``count`` independent guesses: the program itself, as a flow."""
    graph = networkx.DiGraph()
    for draws in itertools.product(range(len(q)), repeat=count):
        graph.add_edge("source", draws, capacity=math.prod(float(q[v]) for v in draws))
        graph.add_edges_from((draws, v) for v in set(draws))
    graph.add_edges_from((v, "sink", {"capacity": float(p[v])}) for v in range(len(p)))
    return networkx.maximum_flow_value(graph, "source", "sink")


def accepted(rule: AcceptanceRule, p: Tensor, q: Tensor, count: int) -> float:
    """The probability that the rule keeps one of ``count`` independent guesses, by running every branch of it."""

    def kept(source: RandomSource) -> bool:
        guesses = [source.categorical(q, _DRAFT_LANE + place) for place in range(count)]
        laws = p.expand(count + 1, -1), q.expand(count + 1, -1)
        row = RowDraft([0, *guesses], [-1, *[0] * count], *laws, Draws.IID)
        return bool(rule.walk_row(row, source).path)

    return enumerate_law(kept).get(True, 0.0)


def naive(p: Tensor, q: Tensor, count: int) -> float:
    """Draw the token first, then look whether it was guessed."""
    return float((p * (1 - (1 - q) ** count)).sum())


def measure(pairs: Sequence[tuple[Tensor, Tensor]], count: int) -> dict[str, list[float]]:
    """What every rule accepts on every pair of laws, the optimum among them."""
    found = {name: [accepted(rule, p, q, count) for p, q in pairs] for name, rule in RULES.items()}
    return {"naive": [naive(p, q, count) for p, q in pairs], **found, "optimum": [optimum(p, q, count) for p, q in pairs]}


def random_pairs(number: int, vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(0)
    raw = [torch.rand(2, vocab_size, generator=chance, dtype=torch.float64).pow(3) for _ in range(number)]
    return [(laws[0] / laws[0].sum(), laws[1] / laws[1].sum()) for laws in raw]


def main(words: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=4)
    parser.add_argument("--guesses", default="2,3")
    parser.add_argument("--pairs", type=int, default=20)
    chosen = parser.parse_args(words)
    pairs, rows = random_pairs(chosen.pairs, chosen.vocab), {}
    print(f"{'guesses':>8} {'rule':<10}{'accepted':>10}{'below the optimum: mean':>26}{'worst':>8}")
    for count in map(int, chosen.guesses.split(",")):
        rows[str(count)] = found = measure(pairs, count)
        for name, values in found.items():
            gaps = [best - value for best, value in zip(found["optimum"], values, strict=True)]
            print(f"{count:>8} {name:<10}{statistics.mean(values):>10.4f}{statistics.mean(gaps):>26.4f}{max(gaps):>8.4f}")
    print(json.dumps({"vocab": chosen.vocab, "pairs": chosen.pairs, "accepted": rows}))
    return rows


if __name__ == "__main__":
    main()
