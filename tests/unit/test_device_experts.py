"""The grouped product of a mixture of experts against ``models/experts.py``, through Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from quantised_blocks import quantised
from test_quantised_kernels import KEPT, matrix_of
from triton_interpreter import DEVICE

from outrider.models.decoder_weights import LayerWeights
from outrider.models.experts import ExpertsMlp, chosen_experts
from outrider.models.features import Experts
from outrider.models.few_bits import FewBits
from outrider.models.gguf.quants import STORAGE_TYPES
from outrider.models.gguf.reader import TensorEntry
from outrider.models.gpu import experts as grouped
from outrider.models.gpu.router import route
from outrider.models.layers import GatedMlp
from outrider.models.linear import linear_of
from outrider.models.packed import LayerMatrices, Packed, packed_if_in_groups
from outrider.models.quantised.gguf_planes import LAYOUTS, planes_of
from outrider.models.quantised.packed_rows import packed
from outrider.models.random_decoder import tiny_config, tiny_weights

LATENT = {"num_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT |= {"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None}
ROUTINGS: list[dict[str, Any]] = [
    {"normalised": False, "groups": 4, "chosen_groups": 2, "scale": 1.5},
    {"normalised": True, "scoring": "sigmoid", "corrected": True, "scale": 2.5},
    {"normalised": True, "scoring": "sigmoid", "corrected": True, "groups": 4, "chosen_groups": 2, "group_best": 2},
]
SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 3}


def layer_of(weights: LayerWeights) -> LayerMatrices:
    large = (weights.qkv, weights.out, weights.gate_up, weights.down)
    return LayerMatrices(*large, weights, weights.shared_gate_up, weights.shared_down)


@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "gpt_oss"])
def test_experts_add_what_the_oracle_adds(family: str, num_rows: int) -> None:
    """Weights that add up to 1 and weights that do not; biases and the clamped gate; one node, some, more than a block's."""
    config = tiny_config(family, **SIZES)
    weights = tiny_weights(config, device=str(DEVICE)).layers[0]
    x = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert config.experts is not None
    found = grouped.experts_mlp(x, layer_of(weights), config.experts, activation=config.activation, exact=False)
    assert found.shape == (3, num_rows, 32)
    torch.testing.assert_close(found.sum(0), ExpertsMlp(config, weights)(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", [*KEPT, *LAYOUTS, "int8", "int4"])
def test_experts_of_few_bits_add_what_their_numbers_add(form: str) -> None:
    """Every form that checkpoints and files have, in steps of which the last is not full where groups allow it."""
    depth = 256 if form.endswith("_K") or form in ("gptq-channel", "fp8-blocks", "int4") else 192
    config = tiny_config("mixtral", **{**SIZES, "hidden_size": depth, "intermediate_size": 256})
    whole = tiny_weights(config, device=str(DEVICE)).layers[0]
    packed = {name: in_form(form, vars(whole)[name]) for name in ("gate_up", "down")}
    numbers = {name: found.unpacked(torch.float32).view_as(vars(whole)[name]) for name, found in packed.items()}
    x = torch.randn(6, depth, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert config.experts is not None
    layer = LayerMatrices(whole.qkv, whole.out, packed["gate_up"], packed["down"], whole)
    found = grouped.experts_mlp(x, layer, config.experts, activation=config.activation, exact=False)
    expected = ExpertsMlp(config, replace(whole, **numbers))(x)
    torch.testing.assert_close(found.sum(0), expected, atol=1e-3, rtol=1e-3)


def in_form(form: str, whole: torch.Tensor) -> FewBits:
    """[E, out, in] matrices as a rounded model, a quantised checkpoint or a GGUF file has them."""
    if form.startswith("int") and form.removeprefix("int").isdigit():
        return packed_if_in_groups(whole, int(form.removeprefix("int")))
    if form in LAYOUTS:
        code, _, raw = quantised(whole.flatten(0, 1).cpu(), form)
        entry = TensorEntry("m", tuple(whole.shape), STORAGE_TYPES[code], 0)
        rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(whole.shape[0] * whole.shape[1], -1)
        return planes_of(rows.to(DEVICE), entry)
    matrix = matrix_of(form, (whole.shape[0] * whole.shape[1], whole.shape[2]))
    return packed(matrix, DEVICE, zeros=matrix.zeros is not None)


@pytest.mark.parametrize(("size", "num_rows"), [(32, 1), (160, 7), (96, 40)])
def test_experts_in_mxfp4_add_what_their_numbers_add(size: int, num_rows: int) -> None:
    """Inputs of one group, of less and of more than a step; exponents near 127, and the smallest there is."""
    config = tiny_config("gpt_oss", **{**SIZES, "hidden_size": 160, "intermediate_size": size})
    whole = tiny_weights(config, device=str(DEVICE)).layers[0]
    packed = {name: mxfp4(vars(whole)[name]) for name in ("gate_up", "down")}
    numbers = {name: found.unpacked(torch.float32).view_as(vars(whole)[name]) for name, found in packed.items()}
    x = torch.randn(num_rows, 160, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert config.experts is not None
    layer = LayerMatrices(whole.qkv, whole.out, packed["gate_up"], packed["down"], whole)
    found = grouped.experts_mlp(x, layer, config.experts, activation=config.activation, exact=False)
    expected = ExpertsMlp(config, replace(whole, **numbers))(x)
    torch.testing.assert_close(found.sum(0), expected, atol=1e-3, rtol=1e-3)


def mxfp4(whole: torch.Tensor) -> Packed:
    """Any e2m1 floats in the shape of [E, out, in] matrices."""
    draw, (num_outputs, depth) = torch.Generator().manual_seed(5), whole.flatten(0, 1).shape
    data = torch.randint(0, 256, (num_outputs, depth // 2), generator=draw, dtype=torch.uint8)
    scales = torch.randint(121, 126, (depth // 32, num_outputs), generator=draw, dtype=torch.uint8)
    scales[0, :2] = 0
    return Packed(data.to(DEVICE), scales.to(DEVICE))


def test_an_mlp_beside_the_experts_adds_its_part() -> None:
    config = tiny_config("deepseek_v3", **LATENT)
    weights = tiny_weights(config, device=str(DEVICE)).layers[1]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert config.experts is not None and weights.shared_gate_up is not None and weights.shared_down is not None
    beside = GatedMlp(config, gate_up=linear_of(weights.shared_gate_up), down=linear_of(weights.shared_down))
    found = grouped.experts_mlp(x, layer_of(weights), config.experts, activation=config.activation, exact=False)
    torch.testing.assert_close(found.sum(0), ExpertsMlp(config, weights, beside)(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_router_chooses_as_the_oracle_does(routing: dict[str, Any]) -> None:
    """Groups of a size that is no power of two, good by one expert or by two; sigmoids, corrected for the choice alone."""
    experts = Experts(count=12, num_chosen=3, size=8, layers=(True,), **routing)
    draw = torch.Generator().manual_seed(4)
    parts = torch.randn(2, 6, 12, generator=draw).to(DEVICE)
    correction = torch.randn(12, generator=draw).to(DEVICE) if experts.corrected else None
    index, shares = (found.view(6, 3) for found in route(parts, None, experts, correction))
    expected, weights = chosen_experts(experts, parts.sum(0), correction)
    assert torch.equal(index.long(), expected)
    torch.testing.assert_close(shares, weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [2, 30])
def test_pairs_stand_in_blocks_by_expert(num_rows: int) -> None:
    """One program and PyTorch's sort make the same blocks: every pair once, and none beside another expert's."""
    experts = Experts(count=6, num_chosen=4, size=8, normalised=True, layers=(True,))
    scores = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    blocks = grouped.choose(scores[None], None, experts)
    index, shares = chosen_experts(experts, scores)
    torch.testing.assert_close(blocks.shares.view(num_rows, 4), shares, atol=1e-5, rtol=1e-5)
    num_pairs, (num_blocks, size) = 4 * num_rows, blocks.pairs.shape
    twins = grouped.sorted_blocks(index.flatten().int(), blocks.shares, num_experts=6, size=size, num_blocks=num_blocks)
    assert torch.equal(blocks.experts, twins.experts) and torch.equal(blocks.pairs, twins.pairs)
    assert sorted(pair for pair in blocks.pairs.flatten().tolist() if pair < num_pairs) == list(range(num_pairs))
    for expert, pairs in zip(blocks.experts.tolist(), blocks.pairs.tolist(), strict=True):
        assert {int(index.flatten()[pair]) for pair in pairs if pair < num_pairs} <= {expert}
