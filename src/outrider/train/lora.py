"""Low-rank adapters: a frozen matrix learns a small difference, which is added to it at the end.

W' = W + (a / r) B A,     A [r, in] random, B [out, r] zero at first          (Hu et al. 2021, arXiv 2106.09685)
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SCALE = 2.0
"""a / r"""


@final
class LoraLinear(nn.Module):
    """A linear layer with frozen weights and a low-rank adapter."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        like = linear.weight
        self.down = nn.Parameter(torch.randn(rank, linear.in_features, device=like.device) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up) * _SCALE

    @property
    def weight(self) -> Tensor:
        """[out, in] the matrix with its adapter added."""
        return self.linear.weight + self.up @ self.down * _SCALE


def add_adapters(module: nn.Module, rank: int) -> None:
    """Freeze a module and add adapters to all its matrices but embeddings. Changes the module."""
    module.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, LoraLinear):
                parent.add_module(name, LoraLinear(child, rank))


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state with every adapter merged into its matrix."""
    found = {name: tensor for name, tensor in module.state_dict().items() if not name.endswith((".down", ".up"))}
    for name, child in module.named_modules():
        if isinstance(child, LoraLinear):
            found[f"{name}.linear.weight"] = child.weight.detach()
    return {name.replace(".linear.", "."): tensor for name, tensor in found.items()}
