"""The experts and the latent attention of a layer in the layout of the native pass."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Array
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor

from outrider.models.decoder_weights import LayerWeights
from outrider.models.features import Experts, Latent, ModelConfig
from outrider.models.native.structs import ExpertsStruct, LatentStruct, MatrixStruct

_BLOCK = 16
_IN_HALF = 2
"""Type number in ``blocks.hpp`` of floats of 16 bits (IEEE) whose products are summed as floats."""


class Packer(Protocol):
    """Packs matrices, and keeps the memory that structures point to alive."""

    def matrix(self, weight: Tensor, bias: Tensor | None, inputs: int, *, is_exact: bool = False) -> MatrixStruct:
        """``is_exact`` keeps the model's own type where other matrices are rounded."""
        ...

    def floats(self, values: Tensor | None) -> int | None: ...


def in_turn(gate_up: Tensor) -> Tensor:
    """Gates and ups in turn, sixteen at a time and padded with zeros, so that both are at hand when a product ends."""
    pair = gate_up.unflatten(0, (2, -1))
    missing = -pair.shape[1] % _BLOCK
    if missing:
        pair = torch.cat((pair, pair.new_zeros(2, missing, *pair.shape[2:])), 1)
    return pair.unflatten(1, (-1, _BLOCK)).transpose(0, 1).flatten(0, 2).contiguous()


def experts_struct(packer: Packer, experts: Experts, weights: LayerWeights, hidden: int) -> ExpertsStruct:
    """Structure of the router, all experts, and the MLP beside them."""
    assert weights.router is not None
    shared = (MatrixStruct(), MatrixStruct())
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        first = packer.matrix(in_turn(weights.shared_gate_up), None, hidden)
        shared = (first, packer.matrix(weights.shared_down, None, experts.shared_size))
    gate_up_bias = None if weights.gate_up_bias is None else [in_turn(bias) for bias in weights.gate_up_bias]
    return ExpertsStruct(
        packer.matrix(weights.router, weights.router_bias, hidden, is_exact=True),
        packer.floats(weights.router_correction),
        _all(packer, (in_turn(one) for one in weights.gate_up), hidden, gate_up_bias),
        _all(packer, weights.down, experts.size, weights.down_bias),
        *shared,
        *(experts.count, experts.num_chosen, experts.groups, experts.chosen_groups, experts.group_best),
        *(experts.scoring == "sigmoid", experts.normalised, experts.scale),
    )


def latent_struct(packer: Packer, latent: Latent, weights: LayerWeights) -> LatentStruct:
    """Structure of the parts of latent attention between its first and its last product."""
    assert weights.key_up is not None and weights.value_up is not None
    up = MatrixStruct() if weights.query_up is None else packer.matrix(weights.query_up, None, weights.query_up.shape[1])
    return LatentStruct(
        up,
        _all(packer, weights.key_up, latent.nope_dim, is_exact=True),
        _all(packer, weights.value_up, latent.rank, is_exact=True),
        packer.floats(weights.latent_norm),
        packer.floats(weights.query_norm),
        *(latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim, latent.norm_eps),
    )


def part_matrices(config: ModelConfig, weights: LayerWeights) -> list[tuple[Tensor, int, bool]]:
    """Every matrix in the two structures with its number of inputs, and whether it keeps the model's type."""
    hidden, experts, latent = config.hidden_size, config.experts, config.latent
    found = list[tuple[Tensor | None, int, bool]]()
    if latent is not None and weights.key_up is not None and weights.value_up is not None:
        found += [(weights.query_up, latent.query_rank or 0, False)]
        found += [(matrix, latent.nope_dim, True) for matrix in weights.key_up]
        found += [(matrix, latent.rank, True) for matrix in weights.value_up]
    if experts is not None and weights.router is not None:
        found += [(weights.router, hidden, True)]
        found += [(weights.shared_gate_up, hidden, False), (weights.shared_down, experts.shared_size, False)]
        found += [(matrix, hidden, False) for matrix in weights.gate_up]
        found += [(matrix, experts.size, False) for matrix in weights.down]
    return [(matrix, inputs, is_exact) for matrix, inputs, is_exact in found if matrix is not None]


def widest_mlp(config: ModelConfig) -> int:
    """Inner size of the widest MLP that every node of a pass goes through."""
    return max(config.mlp_size, 0 if config.experts is None else config.experts.shared_size)


def _all(
    packer: Packer, stack: Iterable[Tensor], inputs: int, biases: Iterable[Tensor] | None = None, *, is_exact: bool = False
) -> Array[MatrixStruct]:
    each = repeat(None) if biases is None else biases
    made = [packer.matrix(one, bias, inputs, is_exact=is_exact) for one, bias in zip(stack, each, strict=False)]
    if len({one.is_stored for one in made}) > 1:  # one has a weight that is too large for sums of 16 bits, so all add floats
        for one in made:
            one.is_stored = _IN_HALF
    return (MatrixStruct * len(made))(*made)
