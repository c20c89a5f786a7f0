"""A pair of continuous image models from MNIST: digits of 8 x 8 pixels as 16 tokens of 2 x 2, no codebook.

The draft learns from the images first, as the target does, and then from the target. What it learns then is the divergence of
the two laws of a path, step by step. A path is kept with 1 minus the total variation of these laws, which that bounds.

python recipes/images_continuous.py --data mnist.npz --out build/images/continuous      # CPU, minutes
python benchmarks/images_continuous.py --model build/images/continuous
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from images import read_images
from torch import Tensor

from outrider.images.continuous.model import ContinuousShape, HeadChain, Network, diffusion_loss, save_network
from outrider.images.continuous.paths import Schedule

NUM_STEPS = (25, 50)
"""Numbers of steps of the schedules for which the draft learns the target's paths."""
DRAWN = 3
"""Steps of each that a batch is noised to."""
SHAPES = {
    "target": ContinuousShape(),
    "draft": ContinuousShape(width=32, num_layers=1, num_heads=1, head_width=64, head_layers=1),
}


def tokens_of(images: Tensor) -> Tensor:
    """[N, 16, 4] patches of 2 x 2 pixels in -1 .. 1, of pictures [N, side, side, 1] in 0 .. 1; 28 are made 8."""
    small = images[..., 0] if images.shape[1] == 8 else shrunk(images)
    cells = small.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4)
    return cells.reshape(len(small), 16, 4) * 2 - 1


def shrunk(images: Tensor) -> Tensor:
    """[N, 8, 8] of [N, 28, 28, 1]."""
    return F.avg_pool2d(F.pad(images[..., 0], (2, 2, 2, 2))[:, None], 4)[:, 0]


Loss = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Computes the loss of tokens [B, N, D] and labels [B]."""


def path_loss(draft: Network, target: Network) -> Loss:
    """The divergence of the draft's path from the target's, at a few steps of each schedule in turn."""

    def loss(tokens: Tensor, labels: Tensor, chance: torch.Generator) -> Tensor:
        clean = tokens.flatten(0, 1)
        with torch.no_grad():
            known = target.conditions(tokens[:, :-1], labels).flatten(0, 1)
        own, total = draft.conditions(tokens[:, :-1], labels).flatten(0, 1), clean.new_zeros(())
        for schedule in map(Schedule, NUM_STEPS):
            p, q = HeadChain(target, known, schedule), HeadChain(draft, own, schedule)
            for t in (1 + torch.randperm(schedule.num_steps, generator=chance)[:DRAWN]).tolist():
                x = schedule.noisy(clean, torch.full((len(clean),), t), torch.randn(clean.shape, generator=chance))
                with torch.no_grad():
                    wanted = p.mean(x, t)
                total = total + ((q.mean(x, t) - wanted) / p.width(t)).square().sum(-1).mean() / 2 * schedule.num_steps
        return total / len(NUM_STEPS) / DRAWN

    return loss


def train(network: Network, loss_of: Loss, data: tuple[Tensor, Tensor], *, num_steps: int, batch: int, name: str) -> float:
    """Adam, with a cosine to zero; returns the mean loss of the last steps."""
    chance, (tokens, labels) = torch.Generator().manual_seed(0), data
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))
    )
    began, losses = time.monotonic(), []
    for step in range(num_steps):
        rows = torch.randint(len(tokens), (batch,), generator=chance)
        loss = loss_of(tokens[rows], labels[rows], chance)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 200 == 0:
            print(f"{name}: step {step} of {num_steps}, loss {losses[-1]:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return sum(losses[-100:]) / len(losses[-100:])


def make(data: Path, out: Path, *, num_steps: int, path_steps: int, batch: int) -> dict[str, float]:
    """Target and draft."""
    torch.manual_seed(0)
    images, labels = (part[:20_000] for part in read_images(data, "train"))
    known, report = (tokens_of(images), labels), dict[str, float]()
    networks = {name: Network(shape) for name, shape in SHAPES.items()}
    for name, network in networks.items():
        report[f"{name}_parameters"] = sum(parameter.numel() for parameter in network.parameters())
        of_data = partial(diffusion_loss, network)
        report[f"{name}_loss"] = train(network, of_data, known, num_steps=num_steps, batch=batch, name=name)
    of_paths = path_loss(networks["draft"], networks["target"].requires_grad_(False))
    report["path_loss"] = train(networks["draft"], of_paths, known, num_steps=path_steps, batch=batch, name="draft's paths")
    for name, network in networks.items():
        notes = {
            "data": data.name,
            "steps": num_steps,
            "path_steps": path_steps,
            "batch": batch,
            "shape": asdict(SHAPES[name]),
            "report": report,
        }
        save_network(network, out / name, notes)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="mnist.npz, or digits of 8 pixels in the same layout")
    parser.add_argument("--out", type=Path, default=Path("build/images/continuous"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--path-steps", type=int, help="steps in which the draft learns the target's paths (default: --steps)")
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    path_steps = arguments.path_steps or arguments.steps
    report = make(arguments.data, arguments.out, num_steps=arguments.steps, path_steps=path_steps, batch=arguments.batch)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
