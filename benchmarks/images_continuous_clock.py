"""Seconds of an image of continuous tokens by rule, against plain decoding, alone and in a batch.

All ways take turns in one process, and each is given by its median with the least and the most. With one thread the seconds
are those of the process, which leave out the time that others have the core.

    python benchmarks/images_continuous_clock.py --model build/images/continuous [--rounds 10] [--batches 1 16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from continuous_ways import RULES, WINDOW, pair

from outrider.bench.provenance import keep_results
from outrider.images.continuous.decode import ContinuousSettings, PathWriter, write_plain


def _clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def rows_of(folder: Path, num_steps: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """A row per way, plain decoding first; the first round of each is not counted."""
    target, draft = pair(folder, num_steps)
    writers = {"plain": PathWriter(target)} | {
        name: PathWriter(target, draft, rule, ContinuousSettings(WINDOW)) for name, rule in RULES.items()
    }
    names = ["plain", "plain, without a cache", *RULES]
    seconds, passes, paths = ({name: list[float]() for name in names} for _ in range(3))
    for number in range(rounds + 1):
        labels = (torch.arange(batch) + number) % target.num_classes
        for name in names:
            began, chance = _clock(), torch.Generator().manual_seed(number)
            if name in writers:
                rows = writers[name].write(labels, chance).rows
                passes[name].append(sum(row.stats.num_passes for row in rows) / batch)
                paths[name].append(sum(row.num_paths for row in rows) / batch)
            else:
                write_plain(target, labels, chance)
            if number:
                seconds[name].append((_clock() - began) / batch * 1e3)
    plain = statistics.median(seconds["plain"])
    return [
        {
            "rule": name,
            "lossless": name not in RULES or RULES[name].lossless,
            "steps": num_steps,
            "batch": batch,
            "passes": round(statistics.mean(passes[name] or [target.num_tokens]), 2),
            "paths": round(statistics.mean(paths[name] or [target.num_tokens]), 2),
            "ms_an_image": round(statistics.median(seconds[name]), 2),
            "least": round(min(seconds[name]), 2),
            "most": round(max(seconds[name]), 2),
            "to_plain": round(plain / statistics.median(seconds[name]), 3),
        }
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/images/continuous"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--note", default="", help="what else the results should say of the models or the machine")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows = [row for batch in arguments.batches for row in rows_of(arguments.model, arguments.steps, batch, arguments.rounds)]
    for row in rows:
        print(f"{row['rule']:<26} batch {row['batch']:<3}{row['ms_an_image']:9.1f} ms  {row['to_plain']:5.2f}x of plain")
    clock = "CPU time" if torch.get_num_threads() == 1 else "wall time"
    what = f"{clock} of an image of 16 continuous tokens, all ways in turns, median of {arguments.rounds}{arguments.note}"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/images_continuous_clock.py")))


if __name__ == "__main__":
    main()
