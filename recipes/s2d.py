"""A sorted draft, judged: each of its exits alone, and the exit chosen by confidence, on the bundled target.

outrider train sorted --data own.npy --out runs -O exits=1,2,4
python recipes/s2d.py runs/sorted --exits 1,2,4 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.core.params import SamplingParams

STORIES = Path(__file__).parents[1] / "benchmarks/held_out_stories.jsonl"
NUM_PROMPT_TOKENS = 24


def ways(exits: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Options of every fixed exit, and of the choice among them. A bar of 0 is passed at the first exit."""
    last = exits[-1]
    fixed = {f"exit {e}": {"exits": (e, last) if e < last else (e,), "threshold": 0.0, "stop_threshold": 0.0} for e in exits}
    return {**fixed, **{f"chosen, {bar}": {"exits": exits, "threshold": bar, "stop_threshold": 0.0} for bar in (0.5, 0.7, 0.9)}}


def judge(llm: LLM, texts: list[list[int]], options: dict[str, Any], params: SamplingParams) -> dict[str, Any]:
    """Figures of one way, and its texts."""
    method = llm.compose("s2d", policy="fixed", num_draft_tokens=4, **options)
    outs = llm.generate(texts, params, method=method)
    counts, layers = vars(method.drafter)["num_guesses"], vars(method.drafter)["exits"]
    depth = sum(count * layer for count, layer in zip(counts, layers, strict=True)) / sum(counts)
    rate = sum(out.stats.num_tokens for out in outs) / sum(out.stats.num_passes for out in outs)
    figures = {"tokens_per_pass": round(rate, 3), "layers_per_guess": round(depth, 3)}
    return {**figures, "texts": [list(out.token_ids) for out in outs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", help="folder of the sorted draft")
    parser.add_argument("--exits", default="1,2,4")
    parser.add_argument("--count", type=int, default=16, help="held-out stories, of which the first tokens are given")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    how: dict[str, Any] = {"draft": arguments.draft, "fast": False, "dtype": "float32", "max_batch_size": arguments.count}
    llm, params = LLM(bundled_path("target"), method="s2d", **how), SamplingParams(max_tokens=arguments.max_tokens)
    stories = STORIES.read_text(encoding="utf-8").splitlines()[: arguments.count]
    texts = [llm.codec.encode(json.loads(line)["text"])[:NUM_PROMPT_TOKENS] for line in stories]
    plain, rows = [list(out.token_ids) for out in llm.generate(texts, params, method="plain")], list[dict[str, Any]]()
    for name, options in ways(tuple(map(int, arguments.exits.split(",")))).items():
        found = judge(llm, texts, options, params)
        assert found.pop("texts") == plain, "speculation changed the text"
        rows.append({"exit": name, **found})
        print(rows[-1], flush=True)
    if arguments.json:
        what = "a sorted draft of the bundled target: each exit alone and the exit chosen by confidence, greedy, chains of four"
        keep_results(arguments.json, what, rows, script="recipes/s2d.py")


if __name__ == "__main__":
    main()
