"""Every row of the method table that needs no training, under its default policy on a GPU, beside plain decoding.

    PYTHONPATH=src python benchmarks/gpu_rows.py [--tokens 96] [--rounds 3] [--json FILE] [--methods suffix jacobi]

The models are the bundled pair in 8B shapes (recipes/inflate.py) in default numerics, batch 1, greedy, every row with its own
default options. Plain decoding runs before each row, over the same prompts. A figure is the median over rounds of a row's
tokens per second over those of the plain run in front of it. The suite *stories* has held-out stories of the models' own
domain; *copying* asks for a story again or with another name. The first round is not counted: kernels compile and prices are
learned. Rounds are captured beforehand. ``captured`` says whether they ran as graphs. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]
from gpu import Bench, held_out_stories  # noqa: E402  # pyright: ignore

from outrider.bench.provenance import results_head  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.codecs.load import load_codec  # noqa: E402
from outrider.core.errors import OutriderError  # noqa: E402
from outrider.core.method import Method  # noqa: E402
from outrider.methods import METHODS  # noqa: E402

MODE = "invariant"
STORY_LEN = 24
ROWS = [name for name, row in METHODS.items() if ".heads." not in row.drafter.__module__]


def prompts_of(bench: Bench) -> dict[str, list[list[int]]]:
    """Beginnings of four held-out stories, and two copying prompts of either kind."""
    codec = load_codec(bundled_path("target"))
    begun = [codec.encode(story)[:STORY_LEN] for story in held_out_stories()[:4]]
    return {"stories": begun, "copying": [prompt for prompts in bench.copying.values() for prompt in prompts[:2]]}


def timed(bench: Bench, method: Method, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """One run over the prompts: its speed, its counts and its texts."""
    began = time.perf_counter()
    states = bench.run(method, prompts, num_tokens, mode=MODE)
    seconds = time.perf_counter() - began
    tokens, passes, drafted = (sum(vars(s.stats)[key] for s in states) for key in ("num_tokens", "num_passes", "num_drafted"))
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_pass": tokens / passes,
        "guesses_per_pass": drafted / passes,
        "texts": [list(state.output_ids) for state in states],
    }


def measure(bench: Bench, name: str, load: str, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table on one load."""
    plain, method = bench.method("plain", mode=MODE), bench.method(name, mode=MODE, policy=METHODS[name].policy)
    for _ in bench.rounds[MODE].prepare(method, comes_at_once=True):
        pass
    ratios, speeds, last, reference = list[float](), list[float](), dict[str, Any](), dict[str, Any]()
    for turn in range(options.rounds + 1):
        reference, last = (timed(bench, one, prompts, options.tokens) for one in (plain, method))
        if turn:
            speeds.append(last["tokens_per_second"])
            ratios.append(last["tokens_per_second"] / reference["tokens_per_second"])
    return {
        "method": name,
        "load": load,
        "to_plain": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "tokens_per_second": round(statistics.median(speeds), 1),
        "tokens_per_pass": round(last["tokens_per_pass"], 3),
        "guesses_per_pass": round(last["guesses_per_pass"], 3),
        "captured": bench.rounds[MODE].graphs_of(method) is not None,
        "same_text": sum(a == b for a, b in zip(last["texts"], reference["texts"], strict=True)),
        "texts": len(prompts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=ROWS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench, rows, refused = Bench(context=64), list[dict[str, Any]](), dict[str, str]()
    for name in options.methods:
        for load, prompts in prompts_of(bench).items():
            try:
                rows.append(measure(bench, name, load, prompts, options))
            except OutriderError as error:  # it wants trained heads, a corpus or a second draft
                refused[name] = str(error)
                break
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                what = "every row without training under the default policy, batch 1, greedy, 8B shapes, beside plain decoding"
                document = {**results_head(what, script="benchmarks/gpu_rows.py"), "rows": rows, "refused": refused}
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
