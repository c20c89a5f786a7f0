"""What the benchmarks of continuous tokens share: the rules, the pair of models, and the distance of two sets of points."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.images.continuous.model import DiffusionModel
from outrider.images.continuous.paths import Schedule
from outrider.images.continuous.rules import JointPath, LastStep, PathRule, Published, Reflect

WINDOW = 4
RULES: dict[str, PathRule] = {
    "joint-path": JointPath(),
    "reflect": Reflect(),
    "last-step": LastStep(),
    "last-step, own noise": LastStep(shared=False),
    "published": Published(),
}


def pair(folder: Path, num_steps: int) -> tuple[DiffusionModel, DiffusionModel]:
    """Target and draft as the recipe leaves them."""
    schedule = Schedule(num_steps)
    return DiffusionModel.load(folder / "target", schedule), DiffusionModel.load(folder / "draft", schedule)


def ks(a: Tensor, b: Tensor) -> list[float]:
    """The KS distance of two samples [N, D] in each of their D numbers."""
    return [_ks(one.contiguous(), other.contiguous()) for one, other in zip(a.T, b.T, strict=True)]


def _ks(a: Tensor, b: Tensor) -> float:
    places = torch.cat([a, b]).sort().values
    shares = [torch.searchsorted(one.sort().values, places, right=True) / len(one) for one in (a, b)]
    return float((shares[0] - shares[1]).abs().max())
