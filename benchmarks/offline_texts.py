"""Thousands of texts of the bundled target, written as ``outrider train regenerate`` writes them.

    PYTHONPATH=src python benchmarks/offline_texts.py [--texts 3000] [--methods default plain] [--profile] [--out FILE]

Every prompt is a beginning of 16 tokens, and a text has at most 256 more at temperature 0.8. Reported for each method are
seconds from the first prompt to the last line of the file, those of the host's own work in CPU time, and tokens per second. A
first run of 64 texts, which is not counted, captures rounds. ``--profile`` prints where the host's time goes. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.train.regenerate import regenerate

BEGINNING = "Once upon a time, there was a little {} who lived in a {}. One day, the {} found a {} and"
WORDS = ("fox", "dog", "cat", "bird", "fish", "girl", "boy", "man", "bear", "duck", "frog", "mouse", "ball", "boat", "tree")
PROMPT_LEN, NEW = 16, 256


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """As many different beginnings."""
    size = len(WORDS)
    names = ([WORDS[number // size**place % size] for place in range(4)] for number in range(count))
    return [llm.codec.encode(BEGINNING.format(*some))[-PROMPT_LEN:] for some in names]


def measure(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    llm = LLM(method=None if name == "default" else name, device=arguments.device)
    llm.max_batch_size = 32 if llm.target.device.type == "cpu" else None
    params = SamplingParams(max_tokens=arguments.new, temperature=0.8, seed=0)
    asked, out = prompts(llm, arguments.texts), folder / f"{name}.jsonl"
    list(regenerate(llm, asked[:64], folder / f"{name}-first.jsonl", params=params))
    profile = cProfile.Profile() if arguments.profile else None
    began, busy = time.perf_counter(), time.process_time()
    with profile or nullcontext():
        for _ in regenerate(llm, asked, out, params=params):
            pass
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    tokens = sum(len(line["tokens"]) - line["prompt_len"] for line in map(json.loads, out.read_text().splitlines()))
    row = {"method": name, "texts": len(asked), "new tokens": tokens, "seconds": seconds, "CPU seconds": busy}
    row |= {"tokens per second": tokens / seconds}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--new", type=int, default=NEW, help="most new tokens of a text")
    parser.add_argument("--methods", nargs="*", default=["default", "plain"])
    parser.add_argument("--device")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, arguments, Path(folder)) for name in arguments.methods]
    what = f"{arguments.texts} texts of the bundled target, prompts of {PROMPT_LEN} tokens, temperature 0.8"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/offline_texts.py")))


if __name__ == "__main__":
    main()
