"""``dtype="w8a8"`` on a GPU, interpreted: rounded inputs and products against plain PyTorch, and whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantised_checkpoints import FORMS, fp8, quantise_folder
from test_decoder_families import make_checkpoint
from torch import Tensor
from triton_interpreter import DEVICE

from outrider.core.errors import OptionError
from outrider.core.tree import TokenTree
from outrider.models.gpu import products
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.finish import SILU, Finish
from outrider.models.gpu.float8_matmul import float8_product, float8_tile, multiply_float8, rounded_rows
from outrider.models.gpu.gates import gated_rows
from outrider.models.gpu.tile import Tile
from outrider.models.gpu.tiles import Kind
from outrider.models.layers import activation_of
from outrider.models.load import lean_config, load_model, read_config
from outrider.models.packed import Matrix, Packed
from outrider.models.quantised.float8 import float8_weights, pack_floats, round_inputs
from outrider.models.quantised.folder import checkpoint
from outrider.models.quantised.open import packed_weights
from outrider.models.weights import SafetensorsFolder, read_weights

CHAIN = TokenTree.chain(torch.tensor([[3, 4, 5]], device=DEVICE))
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}


def inputs(num_rows: int, depth: int = 256) -> Tensor:
    """Rows of very different sizes: zeros, the smallest floats, numbers at the edge between two steps."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(num_rows, depth, generator=draw) * torch.logspace(-3, 3, num_rows)[:, None]
    x[0, :128] = 0
    x[-1, 5] = 448.0 * 2.0 ** torch.arange(-4, 4)[num_rows % 8]
    return x.to(DEVICE)


def matrix(num_outputs: int, depth: int = 256, *, grouped: bool = False) -> Packed:
    draw = torch.Generator().manual_seed(1)
    packed = pack_floats(torch.randn(num_outputs, depth, generator=draw) * 0.1)
    scales = torch.rand(depth // 128, num_outputs, generator=draw) + 0.5 if grouped else packed.scales
    return Packed(packed.data.to(DEVICE), scales.to(DEVICE), rounds_inputs=True)


def oracle(x: Tensor, weight: Packed, *, gated: bool = False, finish: Finish | None = None) -> Tensor:
    codes, steps = round_inputs(x)
    y = (codes.float() * steps.repeat_interleave(128, -1)) @ weight.unpacked(torch.float32).T
    finish = finish or (SILU if gated else Finish("none"))
    y = y if finish.bias is None else y + finish.bias
    if gated:
        return gated_rows(y, finish.activation)
    return y if finish.activation == "none" else activation_of(finish.activation)(y)


def test_the_kernel_rounds_inputs_as_plain_pytorch_does() -> None:
    x = inputs(40, 384)
    codes, steps = rounded_rows(x)
    wanted, wanted_steps = round_inputs(x)
    assert torch.equal(codes.float(), wanted.float())
    there = wanted.float().unflatten(-1, (-1, 128)).abs().amax(-1) > 0
    assert torch.equal(steps.T[there], wanted_steps[there])
    top = codes.float().abs().unflatten(-1, (-1, 128)).amax(-1)[there]
    assert top.max() == 448 and top.min() >= 224, "the largest code of a unit uses all its bits"


def test_every_step_is_the_least_power_of_two_that_fits() -> None:
    tops = torch.tensor([447.9, 448.0, 448.1, 1e-30, 2.0**-126, 3e38])
    x = torch.zeros(6, 128)
    x[:, 7] = tops
    codes, steps = round_inputs(x)
    assert steps[:3, 0].tolist() == [1.0, 1.0, 2.0]
    assert torch.equal(rounded_rows(x.to(DEVICE))[0].float().cpu(), codes.float())
    ratio = tops / steps[:, 0]
    assert (ratio[[0, 1, 2, 3, 5]] > 224).all() and (ratio <= 448).all()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_products_are_those_of_the_rounded_numbers(num_rows: int, grouped: bool) -> None:
    x, weight = inputs(num_rows), matrix(48, grouped=grouped)
    bias = torch.linspace(-1, 1, 48, device=DEVICE)
    cases = [(False, Finish("none"), 1, 1), (False, Finish("none"), 2, 1), (False, Finish("none"), 1, 2)]
    cases += [(False, Finish("gelu", bias), 1, 1), (True, SILU, 1, 1), (True, Finish("gelu_tanh", bias), 1, 1)]
    for gated, finish, parts, folds in cases:
        tile = Tile(16, 128, bm=16, num_parts=parts)
        y = float8_product(x, weight, tile=tile, folds=folds, gated=gated, finish=finish)
        y = y.sum(0) if y.dim() == 3 else y
        assert_near(y, oracle(x, weight, gated=gated, finish=finish))


@pytest.mark.parametrize("kind", Kind)
def test_any_number_of_rows_takes_the_same_numbers(kind: Kind) -> None:
    gated = kind is Kind.GATED
    x, weight = inputs(70, 640), matrix(256, 640)
    wanted = oracle(x, weight, gated=gated)
    for count in (1, 16, 33, 70):
        y = products.multiply(x[:count], weight, kind).float()
        y = y.sum(0) if y.dim() == 3 else y
        assert_near(y, wanted[:count])


@pytest.mark.parametrize("family", ["llama", "gemma2", "starcoder2"])
def test_a_model_multiplies_rounded_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The scores are those of the same decoder whose products are plain PyTorch."""
    changes = {"starcoder2": {"sliding_window": None}, "gemma2": {"head_dim": 32, "num_attention_heads": 4}}
    make_checkpoint(tmp_path, family, {**SIZES, **changes.get(family, {})})
    config = lean_config(tmp_path)
    weights = read_weights(SafetensorsFolder(tmp_path), config, dtype=torch.float32, device=DEVICE)
    fast = FastDecoder(*float8_weights(config, weights))
    layer = fast.weights.layers[0]
    for found in (layer.qkv, layer.out, layer.gate_up, layer.down):
        assert isinstance(found, Packed) and found.is_float and found.rounds_inputs
    assert isinstance(fast.weights.head, Tensor)
    scores, counted = scores_of(fast), 0

    def plain(x: Tensor, weight: Packed, kind: Kind, *, gated: bool, finish: Finish, out_dtype: torch.dtype) -> Tensor:
        nonlocal counted
        counted += 1
        y = oracle(x, weight, gated=gated, finish=finish).to(out_dtype)
        return y if kind not in (Kind.NARROW, Kind.WIDE) else y.float()[None]

    monkeypatch.setattr(products, "multiply_float8", plain)
    torch.testing.assert_close(scores, scores_of(fast), atol=2e-3, rtol=1e-3)
    assert counted == 4


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-tensor", "fp8-128"])
def test_codes_of_an_fp8_checkpoint_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(FORMS, "fp8-128", fp8((128, 128)))
    make_checkpoint(tmp_path, "llama", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4})
    quantise_folder(tmp_path, kind)
    layer = opened(tmp_path, monkeypatch).weights.layers[0]
    assert all(isinstance(each, Packed) and each.rounds_inputs for each in (layer.qkv, layer.out, layer.gate_up, layer.down))
    folder = checkpoint(tmp_path, read_config(tmp_path))
    for name, each in (("self_attn.o_proj", layer.out), ("mlp.down_proj", layer.down)):
        own = folder.read(f"model.layers.0.{name}.weight").float().to(DEVICE)
        assert torch.equal(unpacked(each), own)


def test_experts_of_an_fp8_checkpoint_take_inputs_of_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    make_checkpoint(tmp_path, "mixtral", {**SIZES, **changes})
    quantise_folder(tmp_path, "fp8-channel")
    layer = opened(tmp_path, monkeypatch).weights.layers[0]
    assert isinstance(layer.out, Packed) and layer.out.rounds_inputs
    assert isinstance(layer.gate_up, Packed) and layer.gate_up.is_float and not layer.gate_up.rounds_inputs


@pytest.mark.parametrize("kind", ["gptq", "fp8-blocks"])
def test_other_quantised_matrices_are_rounded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Those of other codes, or with scales for fewer than 128 inputs."""
    make_checkpoint(tmp_path, "llama", SIZES)
    quantise_folder(tmp_path, kind)
    own = checkpoint(tmp_path, read_config(tmp_path)).read("model.layers.0.mlp.down_proj.weight").bfloat16()
    down = opened(tmp_path, monkeypatch).weights.layers[0].down
    assert isinstance(down, Packed) and down.rounds_inputs
    assert torch.equal(down.data.float().cpu(), pack_floats(own).data.float())


def test_what_has_no_such_product_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", SIZES)
    with pytest.raises(OptionError, match=r"w8a8.*compute capability 8.9 or later"):
        load_model(str(tmp_path), dtype="w8a8", device="cpu", fast=False)


def test_units_are_whole_and_parts_are_all_there() -> None:
    for rows in (1, 17, 33, 65, 300, 2048):
        for outputs in (64, 4096, 14336):
            tile = float8_tile(rows, outputs, 4, gated=False)
            assert tile.bk == 128 and tile.num_parts in (1, 4)
            assert float8_tile(rows, outputs, 1, gated=True).num_parts == 1
    with pytest.raises(AssertionError, match="whole units"):
        multiply_float8(inputs(1, 64), matrix(48, 64), Kind.HEAD, gated=False, finish=Finish("none"), out_dtype=torch.float32)


def assert_near(y: Tensor, expected: Tensor) -> None:
    """Rows differ in size, so each is compared with its own."""
    assert y.shape == expected.shape
    assert ((y - expected).norm(dim=-1) <= 1e-4 * expected.norm(dim=-1)).all()


def opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> FastDecoder:
    """The fast decoder on a quantised folder, as a GPU would open it."""
    monkeypatch.setattr("outrider.models.quantised.open.gpu_can_run", lambda *_: True)
    config = lean_config(path)
    weights = packed_weights(config, checkpoint(path, read_config(path)), DEVICE, rounds_inputs=True)
    assert weights is not None
    return FastDecoder(*float8_weights(config, weights))


def unpacked(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, Packed)
    return replace(matrix, rounds_inputs=False).unpacked(torch.float32)


def scores_of(fast: FastDecoder) -> Tensor:
    cache = fast.new_cache(1)
    cache.reserve(3)
    return fast.forward(CHAIN.tokens, fast.step_of(CHAIN, cache))[0]
