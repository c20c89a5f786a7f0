"""Acceptance of continuous tokens by rule, schedule, shared noise and place in the image, and passes of whole images.

Acceptance is measured on prefixes that the target wrote: every token of every image is drafted once and judged once. Whole
images are then written with each rule; their law is compared with the target's by KS over single numbers of tokens, beside the
distance of two target runs (the noise floor). The last line of the output is JSON.

    python benchmarks/images_continuous.py --model build/images/continuous [--images 200] [--steps 25,50]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.images.continuous.decode import ContinuousSettings, Writer, write_plain
from outrider.images.continuous.model import DiffusionModel
from outrider.images.continuous.paths import Schedule, denoised, fresh_noise
from outrider.images.continuous.rules import JointPath, LastStep, PathRule, Published, Reflect

RULES: dict[str, PathRule] = {
    "joint-path": JointPath(),
    "reflect": Reflect(),
    "last-step": LastStep(),
    "last-step, own noise": LastStep(shared=False),
    "published": Published(),
}


def ks(a: Tensor, b: Tensor) -> float:
    """Mean over all numbers of an image of the KS distance of two sets of images [N, L, D]."""
    columns = zip(a.flatten(1).T, b.flatten(1).T, strict=True)
    found = [_ks(one.contiguous(), other.contiguous()) for one, other in columns]
    return sum(found) / len(found)


def _ks(a: Tensor, b: Tensor) -> float:
    places = torch.cat([a, b]).sort().values
    shares = [torch.searchsorted(one.sort().values, places, right=True) / len(one) for one in (a, b)]
    return float((shares[0] - shares[1]).abs().max())


@torch.no_grad()
def acceptance(target: DiffusionModel, draft: DiffusionModel, rule: PathRule, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Of every token of images that the target wrote, and how far the two tokens of one noise are apart."""
    chance = torch.Generator().manual_seed(1)
    p, q = (model.chain(model.conditions(images[:, :-1], labels).flatten(0, 1)) for model in (target, draft))
    noise = fresh_noise(q, chance)
    drafted = denoised(q, noise)
    found = rule.judge(drafted, noise, p=p, q=q, chance=chance)
    kept = found.kept.view(len(images), -1).float()
    apart = (denoised(p, noise).tokens - drafted.tokens).norm(dim=-1).mean()
    strangers = (denoised(p, fresh_noise(p, chance)).tokens - drafted.tokens).norm(dim=-1).mean()
    quarters = [float(part.mean()) for part in kept.chunk(4, 1)]
    return {
        "kept": float(kept.mean()),
        "by_quarter": quarters,
        "paths": float(found.num_paths.float().mean()),
        "most_paths": int(found.num_paths.max()),
        "distance": float(apart),
        "distance_own_noise": float(strangers),
    }


def written(target: DiffusionModel, draft: DiffusionModel, rule: PathRule, run: Tensor, *, prefill: float) -> dict[str, float]:
    """Whole images: passes of the causal model, and the distance to a target run."""
    labels, settings = torch.arange(len(run)) % 10, ContinuousSettings(4, prefill)
    began = time.perf_counter()
    found = Writer(target, draft, rule, settings).write(labels, torch.Generator().manual_seed(3))
    return {
        "passes": float(found.num_passes.float().mean()),
        "kept": float(found.num_kept.sum() / found.num_judged.sum()),
        "paths_per_token": float(found.num_paths.float().mean()) / target.num_tokens,
        "ks": ks(found.tokens, run),
        "seconds": time.perf_counter() - began,
    }


def measured(folder: Path, num_steps: int, num_images: int) -> dict[str, Any]:
    schedule = Schedule(num_steps)
    target, draft = (DiffusionModel.load(folder / name, schedule) for name in ("target", "draft"))
    labels = torch.arange(num_images) % 10
    runs = [write_plain(target, labels, torch.Generator().manual_seed(seed)) for seed in (7, 8)]
    drafts = write_plain(draft, labels, torch.Generator().manual_seed(9))
    floor, alone = ks(runs[0], runs[1]), ks(drafts, runs[0])
    print(f"T = {num_steps}: KS of two target runs {floor:.3f}, of the draft {alone:.3f}", flush=True)
    rows: dict[str, Any] = {}
    for name, rule in RULES.items():
        rows[name] = {"lossless": rule.lossless, **acceptance(target, draft, rule, runs[0], labels)}
        rows[name]["images"] = {str(x): written(target, draft, rule, runs[0], prefill=x) for x in (0.0, 0.15)}
        one, whole = rows[name], rows[name]["images"]["0.0"]
        paths = f"{one['paths']:.2f} target paths a token (most {one['most_paths']})"
        law = "lossless" if rule.lossless else "LOSSY"
        quarters = " ".join(f"{share:.2f}" for share in one["by_quarter"])
        print(f"  {name:<22} kept {one['kept']:.3f} (quarters {quarters})   {paths}   {law}", flush=True)
        print(f"  {'':<22} images: {whole['passes']:.2f} passes of {target.num_tokens}, KS {whole['ks']:.3f}", flush=True)
    apart = rows["reflect"]
    print(f"  tokens apart: {apart['distance']:.3f} on one noise, {apart['distance_own_noise']:.3f} on their own", flush=True)
    return {"steps": num_steps, "floor": floor, "draft_ks": alone, "rules": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/images/continuous"))
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--steps", default="25,50")
    arguments = parser.parse_args()
    found = [measured(arguments.model, int(word), arguments.images) for word in arguments.steps.split(",")]
    print(json.dumps({"images": arguments.images, "found": found}))


if __name__ == "__main__":
    main()
