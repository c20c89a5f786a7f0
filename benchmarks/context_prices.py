"""Do prices of short texts mislead the default policy in long ones? A pass reads its context, so it takes longer there.

The bundled pair reads up to 8,192 tokens with a wider rotary base. Rounds of every draft length are timed behind contexts of
several lengths, in processor time of one thread, the least of a few rounds. The policy knows the costs of short texts and one
factor for all lengths, the pace. A choice by the prices of the shortest context may be a wrong one. Its speed behind the
long context is computed as a share of the best speed there, for acceptance rates of 0.2 to 0.9.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/context_prices.py [--contexts 64,1024,8192] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch

from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams
from outrider.core.prices import between
from outrider.core.request import Request
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.load import load_model

LONGEST, REPEATS, LENGTHS = 8192 + 256, 12, (0, 1, 2, 3, 4, 6, 8)
RATES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def long_model(name: str) -> Target:
    """A bundled model with a wider rotary base."""
    folder = Path(tempfile.mkdtemp(prefix="long-")) / name
    shutil.copytree(bundled_path(name), folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": 50_000.0, "rope_parameters": {"rope_theta": 50_000.0, "rope_type": "default"}}
    (folder / "config.json").write_text(json.dumps({**raw, **rope, "max_position_embeddings": LONGEST}))
    return load_model(str(folder))


def seconds_by_length(target: Target, draft: Target, num_tokens: int, num_rows: int) -> list[float]:
    """Processor seconds of a round of each draft length behind contexts of about so many tokens."""
    found = list[float]()
    prompts = (
        (7919 * torch.arange(1, num_rows * num_tokens + 1)).view(num_rows, num_tokens).remainder(target.vocab_size).tolist()
    )
    for length in LENGTHS:
        options = {"num_draft_tokens": length} if length else {}
        method = compose("draft-model" if length else "plain", target, draft=draft if length else None, options=options)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        engine, times = Engine(target, method), list[float]()
        batch = engine.start([Request(prompt, params) for prompt in prompts])
        for _ in range(2 + REPEATS):
            began = time.process_time()
            engine.step(batch)
            times.append(time.process_time() - began)
        found.append(min(times[2:]))
    return found


def kept_speed(short: Sequence[float], long: Sequence[float], rate: float) -> float:
    """Share of the best speed that is left where the length is chosen by the costs of a short context."""
    lengths = range(LENGTHS[-1] + 1)
    tokens = list(accumulate([1.0, *accumulate([rate] * LENGTHS[-1], mul)]))
    costs = [[between(list(zip(LENGTHS, curve, strict=True)), length) for length in lengths] for curve in (short, long)]
    chosen = max(lengths, key=lambda length: tokens[length] / costs[0][length])
    best = max(tokens[length] / costs[1][length] for length in lengths)
    return tokens[chosen] / costs[1][chosen] / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="64,1024,4096,8000")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, draft, rows = long_model("target"), long_model("draft"), list[dict[str, Any]]()
    for num_rows in map(int, args.rows.split(",")):
        short = list[float]()
        for context in map(int, args.contexts.split(",")):
            long = seconds_by_length(target, draft, context, num_rows)
            short = short or long
            kept = [kept_speed(short, long, rate) for rate in RATES]
            rows.append({"rows": num_rows, "context": context})
            rows[-1] |= {f"K={length}, ms": round(1e3 * seconds, 2) for length, seconds in zip(LENGTHS, long, strict=True)}
            rows[-1] |= {"kept speed": f"{min(kept):.3f} - {max(kept):.3f}"}
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        what = "milliseconds of a round by context, and the speed that is kept by prices of the shortest one"
        keep_results(args.json, what, rows, script="benchmarks/context_prices.py")


if __name__ == "__main__":
    main()
