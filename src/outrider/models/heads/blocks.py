"""Parts that several kinds of heads are made of: residual blocks, and one output matrix per head or for all."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.level_weights import Affine


class ResidualBlocks(nn.Module):
    """Residual blocks x + silu(A x + a)."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(count))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x

    @staticmethod
    def of(module: nn.Module) -> ResidualBlocks:
        """One block of a module list, with its type."""
        assert isinstance(module, ResidualBlocks)
        return module

    def native_weights(self) -> tuple[Affine, ...]:
        return tuple(map(Affine.of, self.layers))


def new_readouts(config: HeadConfig, num_heads: int) -> nn.ModuleList:
    """One output matrix per head, or one for all."""
    count = num_heads if config.own_readouts else 1
    return nn.ModuleList(nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(count))


def readout_of(readouts: nn.ModuleList, head: int) -> nn.Module:
    """The output matrix of a head: its own, or the one for all."""
    return readouts[min(head, len(readouts) - 1)]
