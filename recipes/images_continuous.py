"""A pair of continuous image models from MNIST: digits of 8 x 8 pixels as 16 tokens of 2 x 2, no codebook.

python recipes/images_continuous.py --data mnist.npz --out build/images/continuous      # CPU, minutes; GPU, one minute
python benchmarks/images_continuous.py --model build/images/continuous
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from images import read_images
from torch import Tensor

from outrider.images.continuous.model import ContinuousShape, Network, diffusion_loss, save_network

SHAPES = {
    "target": ContinuousShape(),
    "draft": ContinuousShape(width=32, num_layers=1, num_heads=1, head_width=64, head_layers=1),
}


def tokens_of(images: Tensor) -> Tensor:
    """[N, 16, 4] patches of 2 x 2 pixels in -1 .. 1, of pictures [N, 28, 28, 1] in 0 .. 1 shrunk to 8 x 8."""
    small = F.avg_pool2d(F.pad(images[..., 0], (2, 2, 2, 2))[:, None], 4)[:, 0]
    cells = small.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4)
    return cells.reshape(len(small), 16, 4) * 2 - 1


def train(network: Network, tokens: Tensor, labels: Tensor, *, num_steps: int, batch: int, name: str) -> float:
    """Adam, with a cosine to zero; returns the mean loss of the last steps."""
    device, chance = next(network.parameters()).device, torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))
    )
    began, losses = time.monotonic(), []
    for step in range(num_steps):
        rows = torch.randint(len(tokens), (batch,), generator=chance)
        loss = diffusion_loss(network, tokens[rows].to(device), labels[rows].to(device), chance)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 200 == 0:
            print(f"{name}: step {step} of {num_steps}, loss {losses[-1]:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return sum(losses[-100:]) / len(losses[-100:])


def make(data: Path, out: Path, *, num_steps: int, batch: int) -> dict[str, float]:
    """Target and draft."""
    torch.manual_seed(0)
    images, labels = (part[:20_000] for part in read_images(data, "train"))
    tokens, device = tokens_of(images), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, float] = {}
    for name, shape in SHAPES.items():
        network = Network(shape).to(device)
        report[f"{name}_parameters"] = sum(parameter.numel() for parameter in network.parameters())
        report[f"{name}_loss"] = train(network, tokens, labels, num_steps=num_steps, batch=batch, name=name)
        notes = {"data": data.name, "steps": num_steps, "batch": batch, "shape": asdict(shape), "report": dict(report)}
        save_network(network, out / name, notes)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="mnist.npz")
    parser.add_argument("--out", type=Path, default=Path("build/images/continuous"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    print(json.dumps(make(arguments.data, arguments.out, num_steps=arguments.steps, batch=arguments.batch)))


if __name__ == "__main__":
    main()
