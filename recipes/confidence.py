"""How well DSpark's confidence head knows itself, on held-out text of the target's own, by depth.

    python recipes/confidence.py --heads build/heads/heads/dspark --text build/heads/own.npy

Per depth: the mean confidence, the mean chance that a sampled guess is accepted (1 - TV), the share of likeliest tokens that
agree, and the calibration error: ten bins by confidence, the mean distance between confidence and chance, weighted by size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from outrider.bundled import bundled_path
from outrider.models.heads import load_head
from outrider.models.load import load_model
from outrider.train.data import Corpus, read_documents
from outrider.train.features import Rows, compute
from outrider.train.objective import acceptance_chance


def calibration_error(sure: Tensor, chance: Tensor, bins: int = 10) -> float:
    """Expected distance between what is promised and what is true, in bins of equal width."""
    place = (sure * bins).long().clamp(max=bins - 1)
    count = torch.zeros(bins).index_add_(0, place, torch.ones_like(sure))
    gap = torch.zeros(bins).index_add_(0, place, sure - chance)
    return float(gap.abs().sum() / count.sum())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=256)
    arguments = parser.parse_args()
    target = load_model(bundled_path("target"), fast=False, dtype="float32")
    head = load_head(arguments.heads, target)
    documents = Corpus.of(read_documents([arguments.text], None, max_len=10_000), held_out=arguments.held_out).held_out
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for begin in range(0, len(documents), 8):
        part = documents[begin : begin + 8]
        rows = Rows(compute(target, part, head.config.taps), part, row_len=512, last=target.num_layers)
        batch = rows.packed(head.config.taps)
        with torch.no_grad():
            for depth, state in enumerate(head.depths(batch, head.config.num_depths or 4)):
                logits, teacher = head.readout(depth, state), target.logits(batch.shifted(batch.last, depth + 1))
                valid = batch.valid(depth + 1)
                facts = torch.sigmoid(head.confidence(state).float()), acceptance_chance(logits, teacher, None)
                hits = (logits.argmax(-1) == teacher.argmax(-1)).float()
                found.setdefault(depth, []).append(tuple(fact[valid].cpu() for fact in (*facts, hits)))  # type: ignore[arg-type]
    for depth, parts in found.items():
        sure, chance, hits = (torch.cat(column) for column in zip(*parts, strict=True))
        means = f"confidence {sure.mean():.3f}, chance {chance.mean():.3f}, hits {hits.mean():.3f}"
        print(f"depth {depth}: {means}, calibration error {calibration_error(sure, chance):.4f}")


if __name__ == "__main__":
    main()
