"""Heads made quick for drafting: on a CPU one node at a time is all overhead, so matrices are stored as they are read fastest
and norms take few operations, as in the lean decoder. The law is the same; such heads can no longer be trained or saved."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from outrider.models.heads.head import Head, Norm
from outrider.models.linear import linear_of
from outrider.models.norms import rms_norm


def quicken(head: Head) -> Head:
    """The same heads, frozen. Changes ``head``; on other devices than a CPU it stays as it is."""
    if next(head.parameters()).device.type != "cpu":
        return head
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                module.add_module(name, _FrozenLinear(child))
            elif isinstance(child, Norm):
                module.add_module(name, _FrozenNorm(child))
    return head


@final
class _FrozenLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self._linear = linear_of(linear.weight.data, None if linear.bias is None else linear.bias.data, twofold=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


@final
class _FrozenNorm(nn.Module):
    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.weight = norm.weight
        self._norm = rms_norm(norm.weight.data, norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x)
