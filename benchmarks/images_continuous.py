"""Acceptance of continuous tokens by rule, schedule, shared noise and place in the image, and passes of whole images.

Acceptance is measured on prefixes that the target wrote: every token of every image is drafted once and judged once. Whole
images are then written with each rule. Their law is compared with the target's by KS over single numbers of tokens, beside the
distance of two target runs (the noise floor). The target writes the first tokens of an image itself: its prefill. The last line
of the output is JSON.

    python benchmarks/images_continuous.py --model build/images/continuous [--images 200] [--steps 25,50]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from continuous_ways import RULES, WINDOW, ks, pair
from torch import Tensor

from outrider.bench.provenance import keep_results
from outrider.images.continuous.decode import ContinuousSettings, PathWriter, write_plain
from outrider.images.continuous.model import DiffusionModel
from outrider.images.continuous.paths import denoised, fresh_noise
from outrider.images.continuous.rules import PathRule

PREFILL = (0.0, 0.05, 0.15)


def mean_ks(a: Tensor, b: Tensor) -> float:
    """Mean over all numbers of an image of the KS distance of two sets of images [N, L, D]."""
    found = ks(a.flatten(1), b.flatten(1))
    return sum(found) / len(found)


@torch.no_grad()
def acceptance(target: DiffusionModel, draft: DiffusionModel, rule: PathRule, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Acceptance at every token of images that the target wrote, and the distance between the two tokens of one noise."""
    chance = torch.Generator().manual_seed(1)
    p, q = (model.chain(model.conditions(images[:, :-1], labels).flatten(0, 1)) for model in (target, draft))
    noise = fresh_noise(q, chance)
    drafted = denoised(q, noise)
    found = rule.judge(drafted, noise, p=p, q=q, chance=chance)
    kept = found.kept.view(len(images), -1).float()
    apart = (denoised(p, noise).tokens - drafted.tokens).norm(dim=-1).mean()
    strangers = (denoised(p, fresh_noise(p, chance)).tokens - drafted.tokens).norm(dim=-1).mean()
    return {
        "kept": float(kept.mean()),
        "kept_by_quarter": [float(part.mean()) for part in kept.chunk(4, 1)],
        "paths": float(found.num_paths.float().mean()),
        "most_paths": int(found.num_paths.max()),
        "distance": float(apart),
        "distance_own_noise": float(strangers),
    }


def written(target: DiffusionModel, draft: DiffusionModel, rule: PathRule, run: Tensor, *, prefill: float) -> dict[str, float]:
    """Whole images: passes of the causal model, the share of judged tokens that were kept, and the distance to a target run."""
    labels, settings = torch.arange(len(run)) % 10, ContinuousSettings(WINDOW, prefill)
    found = PathWriter(target, draft, rule, settings).write(labels, torch.Generator().manual_seed(3))
    stats = [row.stats for row in found.rows]
    kept = sum(one.num_accepted for one in stats) / sum(one.num_tested for one in stats)
    passes = sum(one.num_passes for one in stats) / len(stats)
    return {"passes": passes, "kept": kept, "ks": mean_ks(found.tokens, run)}


def measured(folder: Path, num_steps: int, num_images: int) -> Iterator[dict[str, Any]]:
    """A row per rule; the distances of a second target run and of the draft stand in each."""
    target, draft = pair(folder, num_steps)
    labels = torch.arange(num_images) % 10
    runs = [write_plain(target, labels, torch.Generator().manual_seed(seed)) for seed in (7, 8)]
    drafts = write_plain(draft, labels, torch.Generator().manual_seed(9))
    floor = {"ks_floor": mean_ks(runs[0], runs[1]), "ks_draft": mean_ks(drafts, runs[0])}
    for name, rule in RULES.items():
        row: dict[str, Any] = {"rule": name, "lossless": rule.lossless, "steps": num_steps}
        row |= acceptance(target, draft, rule, runs[0], labels)
        found = [written(target, draft, rule, runs[0], prefill=share) for share in PREFILL]
        row |= {f"{what}_by_prefill": [one[what] for one in found] for what in found[0]}
        yield {key: _rounded(value) for key, value in (row | floor).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/images/continuous"))
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--steps", default="25,50")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows, document = list[dict[str, Any]](), dict[str, Any]()
    shares = ", ".join(f"{share:g}" for share in PREFILL)
    what = f"continuous tokens by rule, {arguments.images} images of digits, windows of {WINDOW}, prefill {shares}"
    for num_steps in map(int, arguments.steps.split(",")):
        for row in measured(arguments.model, num_steps, arguments.images):
            print(row, flush=True)
            rows.append(row)
            document = keep_results(arguments.out, what, rows, script="benchmarks/images_continuous.py")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
