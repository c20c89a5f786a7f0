"""Two draft models, two siblings: each model one of them in turn, or both from the mixture of their laws?

One level of recursive rejection on random laws: p = softmax(l), q = softmax(l + noise) with different noise for either draft.
Prints the mean acceptance of 100 laws per line. ``python benchmarks/turns_or_mixture.py`` (seconds on one CPU core)
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

NUM_LAWS, NUM_DRAWS = 100, 1500
CASES = ((50, 3.0, 1.0), (1000, 4.0, 1.0), (1000, 4.0, 2.0), (1000, 4.0, 0.5))
"""Vocabulary, scale of the target's logits, scale of a draft's errors."""
WAYS = ("turns", "turns, without replacement", "mixture", "mixture, without replacement")


def accepted(p: Tensor, first: Tensor, second: Tensor, *, without_replacement: bool) -> float:
    """Chance that one of two siblings, drawn from ``first`` and ``second`` in this order, is accepted."""
    drawn = torch.multinomial(first, NUM_DRAWS, replacement=True)
    at_once = (p / first)[drawn].clamp(max=1)
    rest = (p - first).clamp(min=0)
    laws = second.expand(NUM_DRAWS, -1).clone()
    if without_replacement:
        laws[torch.arange(NUM_DRAWS), drawn] = 0
    then = torch.minimum(rest / rest.sum(), laws / laws.sum(-1, keepdim=True)).sum(-1)
    return float((at_once + (1 - at_once) * then).mean())


def measure(vocab_size: int, scale: float, error: float) -> dict[str, float]:
    totals = dict.fromkeys(WAYS, 0.0)
    for _ in range(NUM_LAWS):
        logits = torch.randn(vocab_size) * scale
        p = logits.softmax(0)
        good, poor = ((logits + error * worse * torch.randn(vocab_size)).softmax(0) for worse in (1.0, 1.5))
        mixture = (good + poor) / 2
        for way in WAYS:
            laws = (good, poor) if way.startswith("turns") else (mixture, mixture)
            totals[way] += accepted(p, *laws, without_replacement="without" in way) / NUM_LAWS
    return {way: round(total, 3) for way, total in totals.items()}


def main() -> None:
    torch.manual_seed(0)
    rows = [{"vocab_size": v, "scale": s, "error": e, **measure(v, s, e)} for v, s, e in CASES]
    for row in rows:
        print(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
