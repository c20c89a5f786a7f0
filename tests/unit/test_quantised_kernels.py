"""Products of the GPU with the matrices of quantised checkpoints, interpreted: against plain PyTorch, and as a whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_checkpoint import in_mxfp4
from quantised_checkpoints import FORMS, quantise_folder
from test_decoder_families import FAMILIES, make_checkpoint
from torch import Tensor
from triton_interpreter import DEVICE

from outrider.core.tree import TokenTree
from outrider.models.gpu import products
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.products import multiply, sixteen_bits
from outrider.models.gpu.small_batch_matmul import Tile, product, reference_product
from outrider.models.gpu.tiles import Kind
from outrider.models.load import lean_config, load_model, read_config
from outrider.models.packed import Packed, pack
from outrider.models.quantised.folder import QuantisedFolder, checkpoint
from outrider.models.quantised.formats import format_of
from outrider.models.quantised.matrix import Quantised
from outrider.models.quantised.open import stays_on_gpu
from outrider.models.quantised.packed_rows import PackedFolder, PackedRows, can_pack, packed
from outrider.models.weights import SafetensorsFolder, read_weights

CHAIN = TokenTree.chain(torch.tensor([[3, 4, 5]], device=DEVICE))
KEPT = ["gptq", "gptq-symmetric", "gptq-v2", "gptq-channel", "awq", "int4-asymmetric", "gptq-8bit-symmetric", "int8-channel"]
KEPT += ["fp8-channel", "fp8-tensor", "fp8-blocks", "bnb-int8", "nf4", "nf4-double"]
"""Forms whose matrices stay as they are."""


def matrix_of(kind: str, shape: tuple[int, int] = (48, 256)) -> Quantised:
    settings, write = FORMS[kind]
    tensors, _ = write("m", torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    form = format_of({"quantization_config": settings})
    assert form is not None
    found = form.matrix({name.removeprefix("m"): tensor for name, tensor in tensors.items()})
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KEPT)
def test_packing_changes_no_number(kind: str) -> None:
    """Plain PyTorch unpacks the same numbers, and so does the kernel that writes 16 bits."""
    matrix = matrix_of(kind)
    assert can_pack(matrix)
    found = packed(matrix, DEVICE, zeros=matrix.zeros is not None)
    assert found.shape == matrix.shape and torch.equal(found.unpacked(torch.float32).cpu(), matrix.dequantised())
    assert torch.equal(sixteen_bits(found, torch.float32).cpu(), matrix.dequantised())
    assert found.nbytes < matrix.codes.numel() * (matrix.bits / 8) * 1.3


def test_every_e4m3_float_is_itself() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes[codes & 127 != 127].repeat(16, 1).contiguous().view(torch.float8_e4m3fn)  # without NaN
    found = sixteen_bits(Packed(codes, torch.ones(1, 16, device=DEVICE)), torch.bfloat16)
    assert torch.equal(found.float(), codes.float())


@pytest.mark.parametrize("kind", KEPT)
def test_products_are_those_of_the_numbers(kind: str) -> None:
    matrix = matrix_of(kind)
    weight = packed(matrix, DEVICE, zeros=matrix.zeros is not None)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for gated, num_parts in ((False, 1), (True, 1), (False, 2)):
        y = product(x, weight, tile=Tile(bn=16, bk=64, num_stages=2, num_parts=num_parts), gated=gated)
        y = y.sum(0) if num_parts > 1 else y
        expected = reference_product(x, weight.unpacked(torch.float32), gated=gated)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gptq", "fp8-blocks"])
def test_many_rows_go_through_16_bits(kind: str) -> None:
    matrix = matrix_of(kind)
    weight = packed(matrix, DEVICE, zeros=matrix.zeros is not None)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    y = multiply(x, weight, Kind.HEAD)
    torch.testing.assert_close(y, reference_product(x, weight.unpacked(torch.float32)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gptq-act-order", "gptq-8bit", "int8-asymmetric"])
def test_what_no_product_takes_is_made_16_bits(kind: str) -> None:
    assert not can_pack(matrix_of(kind))


def test_forms_with_a_scale_per_output_or_per_128_inputs_take_the_ring() -> None:
    forms = {kind: packed(matrix_of(kind), DEVICE, zeros=False) for kind in ("gptq-symmetric", "int8-channel", "fp8-channel")}
    wide = Packed(forms["int8-channel"].data, forms["int8-channel"].scales.float())
    usual = pack(torch.randn(16, 256, device=DEVICE).half(), 4)
    assert all(products._has_ring(each) for each in (usual, wide, forms["int8-channel"], forms["fp8-channel"]))
    assert not products._has_ring(forms["gptq-symmetric"]), "groups of 32"


def test_rows_are_joined_and_reordered_like_those_of_any_matrix() -> None:
    rows, first, second = PackedRows(), matrix_of("gptq"), matrix_of("awq", (32, 256))
    tables = [rows.table(packed(each, DEVICE, zeros=True)) for each in (first, second)]
    whole = torch.cat(tables)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat((first.dequantised(), second.dequantised()))[order]
    found = rows.matrix(whole[order])
    assert isinstance(found, Packed) and torch.equal(found.unpacked(torch.float32).cpu(), wanted)


@pytest.mark.parametrize("kind", ["gptq", "awq", "int8-channel", "fp8-blocks", "nf4"])
def test_a_model_is_its_dequantised_twin(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "tie_word_embeddings": False}
    make_checkpoint(tmp_path, "llama", sizes)
    quantise_folder(tmp_path, kind)
    fast = packed_decoder(tmp_path)
    assert isinstance(fast.weights.layers[0].qkv, Packed)
    assert_scores_of_the_folder(fast, tmp_path)


LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
LATENT |= {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_shared_experts": 2, "n_group": 2, "topk_group": 1}
LATENT |= {"first_k_dense_replace": 0, "num_key_value_heads": 4}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "another gate": ("gemma2", {"head_dim": 16, "num_attention_heads": 4}),
    "biases": ("starcoder2", {"sliding_window": None}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "latents": ("deepseek_v3", {**LATENT, "num_experts_per_tok": 2}),
    "latents without a query rank": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("kind", ["gptq", "fp8-blocks"])
@pytest.mark.parametrize("what", OTHERS)
def test_every_family_is_its_dequantised_twin(tmp_path: Path, what: str, kind: str) -> None:
    """Gates of other activations, biases of an MLP, experts, latents and what stands beside both: all stay as they are."""
    model_type, changes = OTHERS[what]
    make_checkpoint(tmp_path, model_type, {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, **changes})
    quantise_folder(tmp_path, kind)
    fast = packed_decoder(tmp_path)
    layer = fast.weights.layers[0]
    names = ["qkv", "out", "gate_up", "down"] + ["shared_gate_up", "shared_down"] * (fast.config.latent is not None)
    assert all(isinstance(getattr(layer, name), Packed) for name in names)
    assert layer.query_up is None or isinstance(layer.query_up, Packed)
    assert_scores_of_the_folder(fast, tmp_path)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_mixture_is_rounded_to_few_bits(tmp_path: Path, bits: int) -> None:
    """``dtype="int8"`` and ``"int4"``: experts too, in groups of 128 inputs where there are such."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 4}
    make_checkpoint(tmp_path, "mixtral", {**sizes, "num_experts_per_tok": 2, "sliding_window": None})
    config = lean_config(tmp_path)
    weights = read_weights(SafetensorsFolder(tmp_path), config, dtype=torch.float32, device=DEVICE)
    fast = FastDecoder(config, weights, bits=bits)
    layer, whole = fast.weights.layers[0], weights.layers[0]
    assert isinstance(layer.gate_up, Packed) and isinstance(layer.down, Packed)
    assert (layer.gate_up.bits, layer.down.bits) == (bits, 8)
    rounded = {name: getattr(layer, name).unpacked(torch.float32).view_as(getattr(whole, name)) for name in ("gate_up", "down")}
    rounded |= {name: getattr(layer, name).unpacked(torch.float32) for name in ("qkv", "out")}
    head = fast.weights.head
    assert isinstance(head, Packed)
    twin = FastDecoder(config, replace(weights, layers=[replace(whole, **rounded)], head=head.unpacked(torch.float32)))
    torch.testing.assert_close(scores_of(fast), scores_of(twin), atol=2e-3, rtol=1e-3)


def test_columns_of_act_order_stand_in_the_order_of_their_groups(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1})
    quantise_folder(tmp_path, "gptq-act-order")
    fast = packed_decoder(tmp_path)
    layer = fast.weights.layers[0]
    for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
        assert isinstance(matrix, Packed) and matrix.order is not None
    assert_scores_of_the_folder(fast, tmp_path)


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    """gpt-oss: the experts alone are quantised, gates and ups stand in turn, and inputs come first where they are not."""
    model_type, changes = FAMILIES["gpt-oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_hidden_layers": 1}
    make_checkpoint(tmp_path, model_type, {**changes, **sizes, "layer_types": ["full_attention"]})
    in_mxfp4(tmp_path)
    fast = packed_decoder(tmp_path)
    layer = fast.weights.layers[0]
    assert isinstance(layer.gate_up, Packed) and isinstance(layer.down, Packed) and isinstance(layer.qkv, torch.Tensor)
    assert layer.gate_up.nbytes + layer.down.nbytes == 4 * 3 * 64 * 96 * 17 // 32, "as in the file"
    assert_scores_of_the_folder(fast, tmp_path)


def packed_decoder(path: Path) -> FastDecoder:
    """The fast decoder on the codes of a folder, with activations of 32 bits."""
    config, folder = lean_config(path), checkpoint(path, read_config(path))
    assert isinstance(folder, QuantisedFolder) and stays_on_gpu(config, folder.form)
    source = PackedFolder(folder, DEVICE)
    weights = read_weights(source, config, dtype=torch.float32, device=DEVICE)
    return FastDecoder(config, replace(weights, rows=source.rows))


def assert_scores_of_the_folder(fast: FastDecoder, folder: Path) -> None:
    eager = load_model(str(folder), dtype="float32", device=str(DEVICE), fast=False)
    expected = eager.score(CHAIN, eager.new_cache(1)).logits
    torch.testing.assert_close(scores_of(fast), expected, atol=2e-3, rtol=1e-3)


def scores_of(fast: FastDecoder) -> Tensor:
    cache = fast.new_cache(1)
    cache.reserve(3)
    return fast.forward(CHAIN.tokens, fast.step_of(CHAIN, cache))[0]
