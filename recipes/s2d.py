"""A sorted draft, judged: each of its exits alone, and the exit chosen by confidence, on the bundled target.

outrider train sorted --data own.jsonl --out runs -O exits=1,2,4
python recipes/s2d.py runs/sorted --exits 1,2,4
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from outrider.api import LLM
from outrider.core.params import SamplingParams

PROMPTS = (
    "Once upon a time",
    "There was a small cat",
    "Sam had a red ball",
    "It was a cold day",
    "Anna liked to sing",
    "The sun",
)


def ways(exits: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Options of every fixed exit, and of the choice among them. A bar of 0 is passed at the first exit."""
    last = exits[-1]
    fixed = {f"exit {e}": {"exits": (e, last) if e < last else (e,), "threshold": 0.0, "stop_threshold": 0.0} for e in exits}
    return {**fixed, **{f"chosen, {bar}": {"exits": exits, "threshold": bar, "stop_threshold": 0.0} for bar in (0.5, 0.7, 0.9)}}


def judge(llm: LLM, options: dict[str, Any], params: SamplingParams) -> tuple[list[list[int]], str]:
    """Texts, and a line of figures."""
    method = llm.compose("s2d", policy="fixed", num_draft_tokens=4, **options)
    begin, texts, tokens, passes = time.perf_counter(), list[list[int]](), 0, 0
    for prompt in PROMPTS:
        (output,) = llm.generate(prompt, params, method=method)
        texts.append(list(output.token_ids))
        tokens, passes = tokens + output.stats.num_tokens, passes + output.stats.num_passes
    counts, layers = vars(method.drafter)["num_guesses"], vars(method.drafter)["exits"]
    depth = sum(count * layer for count, layer in zip(counts, layers, strict=True)) / sum(counts)
    return texts, f"{tokens / passes:.3f} tokens per pass, {depth:.2f} layers per guess, {time.perf_counter() - begin:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", help="folder of the sorted draft")
    parser.add_argument("--exits", default="1,2,4")
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    llm, params = LLM(method="s2d", draft=arguments.draft), SamplingParams(max_tokens=arguments.max_tokens)
    plain = [list(llm.generate(prompt, params, method="plain")[0].token_ids) for prompt in PROMPTS]
    for name, options in ways(tuple(map(int, arguments.exits.split(",")))).items():
        texts, line = judge(llm, options, params)
        assert texts == plain, "speculation changed the text"
        print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
