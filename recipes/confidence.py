"""How well DSpark's confidence head knows itself, on held-out text of the target's own, by depth.

    python recipes/confidence.py --heads build/heads/heads/dspark --text build/heads/own.npy [--json FILE]

Reported per depth are the mean confidence, the mean chance that a sampled guess is accepted (1 - TV), and the share of
likeliest tokens that agree. The calibration error is the mean distance between confidence and chance over ten bins by
confidence, weighted by size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.models.heads import load_head
from outrider.models.load import load_model
from outrider.train.data import Corpus, read_documents
from outrider.train.features import DocumentRows, compute
from outrider.train.objective import acceptance_chance


def calibration_error(sure: Tensor, chance: Tensor, bins: int = 10) -> float:
    """Expected distance between what is promised and what is true, in bins of equal width."""
    place = (sure * bins).long().clamp(max=bins - 1)
    count = torch.zeros(bins).index_add_(0, place, torch.ones_like(sure))
    gap = torch.zeros(bins).index_add_(0, place, sure - chance)
    return float(gap.abs().sum() / count.sum())


def reliability(sure: Tensor, chance: Tensor, bins: int = 10) -> list[list[float]]:
    """For every bin that is used: places, mean confidence, mean chance."""
    place = (sure * bins).long().clamp(max=bins - 1)
    parts = [(sure[place == each], chance[place == each]) for each in range(bins) if bool((place == each).any())]
    return [[len(one), round(float(one.mean()), 4), round(float(other.mean()), 4)] for one, other in parts]


def facts_of(folder: Path, text: Path, held_out: int) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """By depth, at every place of held-out texts: confidence, chance, and whether the likeliest tokens agree."""
    target = load_model(bundled_path("target"), fast=False, dtype="float32")
    head = load_head(folder, target)
    documents = Corpus.of(read_documents([text], None, max_len=10_000), held_out=held_out).held_out
    found: dict[int, list[tuple[Tensor, ...]]] = {}
    for begin in range(0, len(documents), 8):
        part = documents[begin : begin + 8]
        rows = DocumentRows(compute(target, part, head.config.taps), part, row_len=512, last=target.num_layers)
        batch = rows.packed(head.config.taps)
        with torch.no_grad():
            for depth, state in enumerate(head.depths(batch, head.config.num_depths or 4)):
                logits, teacher = head.readout(depth, state), target.logits(batch.shifted(batch.last, depth + 1))
                sure, chance = torch.sigmoid(head.confidence(state).float()), acceptance_chance(logits, teacher, None)
                facts, valid = (sure, chance, (logits.argmax(-1) == teacher.argmax(-1)).float()), batch.valid(depth + 1)
                found.setdefault(depth, []).append(tuple(fact[valid].cpu() for fact in facts))
    joined = {depth: [torch.cat(column) for column in zip(*parts, strict=True)] for depth, parts in found.items()}
    return {depth: (sure, chance, hits) for depth, (sure, chance, hits) in joined.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, bins = list[dict[str, Any]](), list[dict[str, Any]]()
    for depth, (sure, chance, hits) in facts_of(arguments.heads, arguments.text, arguments.held_out).items():
        means = {"confidence": sure.mean(), "chance": chance.mean(), "hits": hits.mean()}
        row: dict[str, Any] = {"depth": depth, **{name: round(float(mean), 4) for name, mean in means.items()}}
        row |= {"error": round(calibration_error(sure, chance), 4), "error_greedy": round(calibration_error(sure, hits), 4)}
        print(row, flush=True)
        rows.append(row)
        bins.append({"depth": depth, "chance": reliability(sure, chance), "hits": reliability(sure, hits)})
    if arguments.json:
        what = "DSpark's confidence against the chance that a guess is accepted, sampled and greedy, by depth, in ten bins"
        head = results_head(what, script="recipes/confidence.py")
        arguments.json.write_text(json.dumps({**head, "bins": bins, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
