"""A mixture of experts in plain PyTorch: the oracle of ``gpu/experts.py``.

The router scores E experts for a node, the k best are taken, and their outputs are added with the router's weights.

    s = router(x),   chosen = top k of s,   w = softmax(s over chosen)  or  softmax(s over all) of the chosen
    y = sum over chosen e of  w_e down_e(activation(gate_e x) * up_e x)

DeepSeek's routers choose experts from the best groups only. Weights are sigmoids, and a bias affects the choice alone:

    c = sigmoid(s) + bias,   group = sum of its two best c,   chosen = top k of c in the best groups,   w = sigmoid(s) / sum

Every expert multiplies all nodes that chose it in one product. Weights of experts that no node chose are not read. (Shazeer et
al. 2017, arXiv 1701.06538; Jiang et al. 2024, "Mixtral", arXiv 2401.04088; DeepSeek-AI 2024, arXiv 2412.19437.)
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.decoder_weights import LayerWeights
from outrider.models.features import Experts, ModelConfig
from outrider.models.layers import Mlp, activation_of

ALPHA, LIMIT = 1.702, 7.0
"""Slope and bound of the clamped gate (gpt-oss)."""
TINY = 1e-20
"""Keeps shares finite where all sigmoids are 0."""


def chosen_experts(experts: Experts, scores: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[M, k] expert numbers and their float32 weights, from the router's scores [M, E]."""
    scores = scores.float()
    weights = torch.sigmoid(scores) if experts.scoring == "sigmoid" else torch.softmax(scores, -1)
    choice = scores if correction is None else weights + correction
    if experts.groups > 1:
        groups = choice.unflatten(-1, (experts.groups, -1))
        best = groups.topk(experts.group_best, -1).values.sum(-1).topk(experts.chosen_groups, -1).indices
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        choice = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    index = torch.topk(choice, experts.num_chosen, -1).indices
    shares = weights.gather(-1, index)
    if experts.normalised:
        shares = shares / (shares.sum(-1, keepdim=True) + TINY)
    return index, shares * experts.scale


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up. "clamped": g sigmoid(1.702 g) (u + 1), g at most 7 and u within 7."""
    if activation != "clamped":
        return activation_of(activation)(gate) * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


@final
class ExpertsMlp(Mlp):
    """The experts of one layer, and the MLP that every node goes through beside them."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, shared: Mlp | None = None) -> None:
        assert config.experts is not None and weights.router is not None
        self._shared = shared
        self._experts, self._activation, self._weights, self._router = (
            config.experts,
            config.activation,
            weights,
            weights.router,
        )

    def __call__(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self._router, self._weights.router_bias)
        index, shares = chosen_experts(self._experts, scores, self._weights.router_correction)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in index.unique().tolist():
            node, place = (index == expert).nonzero(as_tuple=True)
            total.index_add_(0, node, self._one(expert, x[node]).float() * shares[node, place, None])
        return total.to(x.dtype) if self._shared is None else total.to(x.dtype) + self._shared(x)

    def _one(self, expert: int, x: Tensor) -> Tensor:
        weights = self._weights
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
        gate, up = F.linear(x, weights.gate_up[expert], bias).chunk(2, -1)
        bias = None if weights.down_bias is None else weights.down_bias[expert]
        return F.linear(gated(self._activation, gate, up), weights.down[expert], bias)
