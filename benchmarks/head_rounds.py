"""What a round of heads costs on a CPU, and the speed that heads of a longer training would have there.

What a round takes depends on a head's shape and not on its weights. So heads without any training are timed here with chains
of four that every round drafts, beside plain decoding, in turns in one process. Seconds are those of the processor, of one
thread. ``projected`` multiplies rounds per second by the tokens per pass that heads of equal training steps brought on a GPU,
behind the target's own text (``heads_equal_steps.json``). It is a product of two measurements, and no text was written at that
speed.

    python benchmarks/head_rounds.py --seats 1,4 --json benchmarks/results/head_rounds.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from seats import Bench, prompts_of

from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.core.params import SamplingParams
from outrider.models.heads import save_head
from outrider.models.load import load_model

import heads  # isort: skip  # pyright: ignore[reportMissingImports]: a recipe, whose folder ``seats`` adds to the path

TRAINED = Path(__file__).parent / "results" / "heads_equal_steps.json"


def untrained(folder: Path, kinds: Sequence[str]) -> Path:
    """New heads of the sizes that ``recipes/heads.py`` trains, a folder for each kind."""
    known, target = {**heads.HEADS, **heads.OTHERS}, load_model(bundled_path("target"), fast=False)
    tokens = np.arange(target.vocab_size, dtype=np.int64)
    for head in heads.new_heads(target, tokens, heads.full_recipe(), {kind: known[kind] for kind in kinds}):
        save_head(head, folder / head.config.kind, notes={})
    return folder


def measure(bench: Bench, seats: int, *, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every method: milliseconds of a round, and of a round over plain decoding's."""
    prompts, params = prompts_of(seats), SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    names = [name for name in bench.methods if not name.endswith("default policy")]
    spent: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            began = time.process_time()
            states = bench.answers(name, prompts, params, seats)
            taken = (time.process_time() - began) / max(state.stats.num_passes for state in states)
            spent[name] += [1e3 * taken] if turn else []
    lengths = {row["heads"]: row["chain of 4, own"] for row in json.loads(TRAINED.read_text())["rows"]}
    plain, rows = statistics.median(spent["plain"]), list[dict[str, Any]]()
    for name, values in spent.items():
        kind, round_ms = name.split(",")[0], statistics.median(values)
        length = lengths.get(kind, 1.0)
        row = {"seats": seats, "method": kind, "round, ms": round(round_ms, 2), "least": round(min(values), 2)}
        row |= {"most": round(max(values), 2), "to a plain round": round(round_ms / plain, 3)}
        rows.append(row | {"tokens per pass on a GPU": length, "projected to plain": round(length * plain / round_ms, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default="dspark,dflash,p-eagle,eagle3")
    parser.add_argument("--seats", default="1,4")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds, rows = args.kinds.split(","), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.bundled(untrained(Path(folder), kinds), kinds)
    what = "rounds of heads on a CPU with fixed chains of four, and the speed that heads trained on a GPU would have there"
    for seats in map(int, args.seats.split(",")):
        rows += (found := measure(bench, seats, num_tokens=args.tokens, rounds=args.rounds))
        keep_results(args.json, what, rows, script="benchmarks/head_rounds.py")
        for row in found:
            print(row, flush=True)


if __name__ == "__main__":
    main()
