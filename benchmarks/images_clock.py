"""Seconds per image of every lossless method, and of two lossy ones, alone and in a batch.

All ways take turns in one process, and each is given by its median with the least and the most. On a CPU with one thread the
seconds are those of the process, which leave out the time that others have the core.

    python benchmarks/images_clock.py --model build/images/mnist/target --draft build/images/mnist/draft
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from image_ways import LIKELY, NUM_GUESSES, Way, kind_of

from outrider.bench.provenance import keep_results
from outrider.core.method import Method
from outrider.images.model import ImageModel


def ways_of(model: ImageModel, heads: Sequence[Path], window: int) -> list[tuple[Way, int]]:
    """Every way with its window; plain decoding first."""
    alone = [Way("plain"), Way("jacobi"), Way("sjd"), Way("sjd-coupled"), Way("sjd", "gsd"), Way("sjd", *LIKELY)]
    drafted = [] if model.draft is None else [Way("draft-model"), Way("draft-model", *LIKELY)]
    drafted += [Way(kind_of(folder), heads=folder) for folder in heads]
    return [*((way, window) for way in alone), *((way, NUM_GUESSES) for way in drafted)]


def seconds_of(model: ImageModel, method: Method, batch_size: int, seed: int) -> tuple[float, float]:
    """Seconds of one image, and how many passes it took."""
    labels = [number % model.num_classes for number in range(batch_size)]
    began = _clock(model.target.device)
    pictures = model.imagine(labels, method, model.params(seed=seed), max_batch_size=batch_size)
    seconds = _clock(model.target.device) - began
    return seconds / batch_size, sum(one.stats.num_passes for one in pictures) / batch_size


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def rows_of(model: ImageModel, ways: Sequence[tuple[Way, int]], batch_size: int, rounds: int) -> list[dict[str, Any]]:
    """A row per way; the first round of each is not counted."""
    methods = [way.compose(model, window) for way, window in ways]
    found: list[list[tuple[float, float]]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for index, method in enumerate(methods):
            measured = seconds_of(model, method, batch_size, 1000 * number)
            if number:
                found[index].append(measured)
    plain = statistics.median(seconds for seconds, _ in found[0])
    rows = [_row(*way, method, batch_size, of) for way, method, of in zip(ways, methods, found, strict=True)]
    return [row | {"to_plain": round(plain / row["ms_an_image"] * 1e3, 3)} for row in rows]


def _row(way: Way, window: int, method: Method, batch_size: int, found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    seconds = [one * 1e3 for one, _ in found]
    row = {
        "method": way.label,
        "guesses": 0 if way.method == "plain" else window,
        "lossless": method.lossless,
        "batch": batch_size,
    }
    row |= {"passes": round(statistics.mean(passes for _, passes in found), 2)}
    row |= {
        "ms_an_image": round(statistics.median(seconds), 3),
        "least": round(min(seconds), 3),
        "most": round(max(seconds), 3),
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--heads", type=Path, nargs="*", default=[], help="folders that outrider train wrote for the model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--device", help="cpu, cuda ... (default: a GPU where there is one)")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    model = ImageModel.load(arguments.model, draft=arguments.draft, device=arguments.device)
    ways, rows = ways_of(model, arguments.heads, arguments.window), []
    for batch_size in arguments.batches:
        rows += rows_of(model, ways, batch_size, arguments.rounds)
    for row in rows:
        print(f"{row['method']:<60} batch {row['batch']:<3}{row['ms_an_image']:9.2f} ms  {row['to_plain']:5.2f}x of plain")
    what = f"time of an image of {arguments.model.parent.name}, all ways in turns, median of {arguments.rounds}"
    what += f" on {model.target.device.type}, {torch.get_num_threads()} threads"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/images_clock.py")))


if __name__ == "__main__":
    main()
