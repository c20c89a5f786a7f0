"""A mixture of experts as the MLP of a layer: each node goes through the few experts its router prefers.

out = sum_e p_e expert_e(x) + sigmoid(w . x) shared(x)         e: the k experts with the largest p = softmax(router(x))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.recurrent.config import ExpertShape
from outrider.models.recurrent.tensors import Tensors


@final
class RoutedExperts:
    """Routed experts, and one that every node goes through."""

    def __init__(self, shape: ExpertShape, tensors: Tensors, hidden: int, shared: Callable[[Tensor], Tensor]) -> None:
        self._shape, self._shared = shape, shared
        self._router = tensors.take("gate.weight", shape.num_experts, hidden)
        self._shared_gate = tensors.take("shared_expert_gate.weight", 1, hidden)
        self._gate_up, self._down = _matrices(shape, tensors.below("experts"), hidden)

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        out = torch.sigmoid(F.linear(x, self._shared_gate)) * self._shared(x)
        for expert in chosen.unique().tolist():
            nodes, places = torch.where(chosen == expert)
            gate, up = F.linear(x[nodes], self._gate_up[expert]).chunk(2, -1)
            found = F.linear(F.silu(gate) * up, self._down[expert])
            out.index_add_(0, nodes, found * weights[nodes, places, None])
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[M, k] weights and numbers of each node's experts."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        law = torch.softmax(F.linear(x, self._router), -1, dtype=dtype)
        weights, chosen = law.topk(self._shape.num_chosen, -1)
        if self._shape.rescaled:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen


def _matrices(shape: ExpertShape, tensors: Tensors, hidden: int) -> tuple[Tensor, Tensor]:
    """[E, 2 M, H] gate and up, [E, H, M] down, stored together or expert by expert."""
    size, count = shape.mlp_size, shape.num_experts
    if tensors.has("gate_up_proj"):
        return tensors.take("gate_up_proj", count, 2 * size, hidden), tensors.take("down_proj", count, hidden, size)
    each = [tensors.below(str(expert)) for expert in range(count)]
    gate_up = [torch.cat([one.take(f"{n}_proj.weight", size, hidden) for n in ("gate", "up")]) for one in each]
    return torch.stack(gate_up), torch.stack([one.take("down_proj.weight", hidden, size) for one in each])
