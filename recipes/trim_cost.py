"""What fewer tokens save in a draft model of a large vocabulary: CPU time of a chain of four, by the tokens it can say.

The draft has random weights, since only its time is asked for: two layers, 512 wide, 131,072 tokens. Each form guesses the
chain in one native call, and token by token through Python. The latter is how a draft runs if sampling needs a function of the
path, such as a grammar. Forms take turns; times are CPU milliseconds of one thread, medians.

    python recipes/trim_cost.py --json benchmarks/results/trim_cost.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.bench.provenance import keep_results
from outrider.core.guessing_target import guess_by_steps
from outrider.core.plan import Plan
from outrider.core.rng import Noise
from outrider.core.tempering import Tempering
from outrider.models.native import NativeDecoder, native_decoder, ready_to_measure
from outrider.models.random_decoder import random_weights, tiny_config
from outrider.models.reduced import ReducedDraft
from outrider.models.weights import Weights

LENGTH, PROMPT_LEN = 4, 64
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def draft_of(weights: Weights, vocab_size: int, kept: int) -> NativeDecoder | ReducedDraft:
    """The draft with the output rows of ``kept`` tokens, evenly spread."""
    ids = torch.arange(0, vocab_size, vocab_size // kept)
    config = tiny_config(vocab_size=kept, num_hidden_layers=2, **SHAPE)
    decoder = native_decoder(config, replace(weights, head=weights.head[ids].contiguous()))
    assert decoder is not None, "this recipe times the native decoder; it needs a C++ compiler"
    return decoder if kept == vocab_size else ReducedDraft(decoder, ids, vocab_size)


def chain_ms(draft: NativeDecoder | ReducedDraft, *, at_once: bool) -> float:
    """CPU milliseconds of a chain behind a prompt that was read before."""
    cache, noise = draft.new_cache(1), Noise(torch.zeros(1).long(), torch.zeros(1).long())
    draft.prefill([[5] * PROMPT_LEN], cache)
    law: dict[str, Any] = {"temperatures": [0.0], "noise": noise, "vocab_size": draft.vocab_size}
    plan = Plan((LENGTH,), (LENGTH,))
    work: Callable[[], object] = lambda: guess_by_steps(draft, [[7]], cache, depths=[LENGTH], **law)  # noqa: E731
    if at_once:
        work = lambda: draft.guess([[7]], cache, plan=plan, tempering=Tempering([0.0]), noise=noise)  # noqa: E731
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=131_072)
    parser.add_argument("--kept", type=int, nargs="+", default=[131_072, 32_768, 8_192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ready_to_measure()
    config = tiny_config(vocab_size=arguments.vocab, num_hidden_layers=2, **SHAPE)
    weights = random_weights(config, dtype=torch.bfloat16, device=torch.device("cpu"))
    drafts = {kept: draft_of(weights, arguments.vocab, kept) for kept in arguments.kept}
    times: dict[tuple[int, bool], list[float]] = {(kept, way): [] for kept in drafts for way in (True, False)}
    with torch.inference_mode():
        for _ in range(arguments.rounds + 1):
            for (kept, way), found in times.items():
                found.append(chain_ms(drafts[kept], at_once=way))
    median = {key: statistics.median(found[1:]) for key, found in times.items()}
    whole = median[arguments.kept[0], True]
    rows: list[dict[str, Any]] = [
        {
            "tokens": kept,
            "in one call, ms": round(median[kept, True], 2),
            "of the first row": round(median[kept, True] / whole, 2),
            "token by token, ms": round(median[kept, False], 2),
        }
        for kept in drafts
    ]
    print(*rows, sep="\n")
    what = f"CPU milliseconds of a chain of four from a random draft of {arguments.vocab} tokens, by the tokens it can say"
    keep_results(arguments.json, what, rows, script="recipes/trim_cost.py")


if __name__ == "__main__":
    main()
