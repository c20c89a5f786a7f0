"""Prepares heads for fast drafting. On a CPU, drafting one node at a time is mostly overhead. So matrices are stored in the
fastest layout and norms take few operations, as in the lean decoder. The law is the same; such heads can no longer be trained
or saved.

Matrices rounded to 8 or 4 bits take less memory and change the law, so fewer guesses may be accepted. They are unpacked for
every product, which makes drafting slower, not faster.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from outrider.models.heads.head import Head, HeadNorm
from outrider.models.linear import linear_of
from outrider.models.norms import rms_norm
from outrider.models.packed import GROUP, pack


def quicken(head: Head, bits: int = 16) -> Head:
    """Freeze heads and round their matrices to this many bits. Changes ``head``. 16-bit matrices change on a CPU only."""
    on_cpu = next(head.parameters()).device.type == "cpu"
    if not on_cpu and bits == 16:
        return head
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                module.add_module(name, _FrozenLinear(child) if bits == 16 else RoundedHeadLinear(child, bits))
            elif isinstance(child, HeadNorm) and on_cpu:
                module.add_module(name, _FrozenNorm(child))
    return head


@final
class _FrozenLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._linear = linear_of(linear.weight.data, None if linear.bias is None else linear.bias.data, twofold=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


@final
class RoundedHeadLinear(nn.Module):
    """A matrix in 8 bits, or in 4 if its inputs are a multiple of 128."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        weight = linear.weight.data
        self.packed = pack(weight, 4 if bits == 4 and weight.shape[1] % GROUP == 0 else 8)
        self._bias = None if linear.bias is None else linear.bias.data

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.packed.unpacked(), self._bias)


@final
class _FrozenNorm(nn.Module):
    def __init__(self, norm: HeadNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self._norm = rms_norm(norm.weight.data, norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x)
