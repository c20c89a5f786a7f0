"""GGUF matrices kept as stored on a GPU, interpreted: planes against the reference dequantisation, products, whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_blocks import quantised
from test_gguf import write_gguf
from test_stored_gguf import MIXES, Q4_K_M, model_file
from triton_interpreter import DEVICE

from outrider.core.errors import OptionError
from outrider.core.tree import TokenTree
from outrider.models import gpu, load
from outrider.models.gguf import GGUFFile, read_gguf
from outrider.models.gguf.stored import stored_matrices
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.finish import Finish
from outrider.models.gpu.planes_matmul import written_out
from outrider.models.gpu.products import multiply, sixteen_bits
from outrider.models.gpu.small_batch_matmul import reference_product
from outrider.models.gpu.tiles import Kind
from outrider.models.info import describe_model
from outrider.models.load import lean_config, load_model
from outrider.models.packed import Packed, Stacked
from outrider.models.planes import Planes
from outrider.models.quantised.gguf_planes import LAYOUTS, gguf_planes, planes_of, planes_source, why_not_on_gpu
from outrider.models.quantised.packed_rows import PackedRows
from outrider.models.weights import read_weights

DEPTHS = {"Q4_K": 512, "Q5_K": 256, "Q6_K": 256}


def matrix_file(folder: Path, kind: str, num_outputs: int = 40) -> GGUFFile:
    """A matrix whose groups differ in size and middle; inputs of the types with blocks of 32 do not fill a step."""
    depth = DEPTHS.get(kind, 224)
    weights = torch.randn(num_outputs, depth, generator=torch.Generator().manual_seed(4))
    weights = weights * torch.logspace(-2, 1, depth // 16).repeat_interleave(16) + 0.05
    return read_gguf(write_gguf(folder / "one.gguf", {}, {"m.weight": quantised(weights, kind)}))


def planes_in(file: GGUFFile) -> Planes:
    return planes_of(file.rows("m.weight").to(DEVICE), file.tensors["m.weight"])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_planes_hold_the_numbers_of_the_file(tmp_path: Path, kind: str) -> None:
    """Those of our own reference and of llama.cpp's package, in about the file's size."""
    file = matrix_file(tmp_path, kind)
    found, wanted = planes_in(file), file.tensor("m.weight")
    assert torch.equal(found.unpacked(torch.float32).cpu(), wanted)
    assert torch.equal(sixteen_bits(found, torch.float32).cpu(), wanted)
    assert torch.equal(sixteen_bits(found, torch.float16).cpu(), wanted.half())  # bfloat16 is cut off when interpreted
    assert found.nbytes <= 1.03 * file.rows("m.weight").nbytes
    gguf = pytest.importorskip("gguf")
    theirs = gguf.quants.dequantize(file.rows("m.weight").numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(theirs, wanted.numpy())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_products_are_those_of_the_numbers(tmp_path: Path, kind: str) -> None:
    """Few rows and many, one part and several, with a gate."""
    weight = planes_in(matrix_file(tmp_path, kind))
    x = torch.randn(70, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    whole = weight.unpacked(torch.float32)
    for matrix_kind in (Kind.HEAD, Kind.WIDE, Kind.GATED):
        gated = matrix_kind is Kind.GATED
        expected, lone = reference_product(x, whole, gated=gated), None
        for count, exact in ((1, False), (5, False), (33, False), (70, True)):
            y = multiply(x[:count], weight, matrix_kind, exact=exact)
            y = y.sum(0) if y.dim() == 3 else y
            torch.testing.assert_close(y, expected[:count], atol=2e-3, rtol=1e-3)
            lone = y[:1].clone() if lone is None else lone
            assert torch.equal(y[:1], lone), "a row's bits are its own"
    y = multiply(x, weight, Kind.HEAD)  # written out, then cuBLAS's
    torch.testing.assert_close(y, reference_product(x, whole), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "none"])
def test_bias_and_activation_are_done_inside(tmp_path: Path, activation: str) -> None:
    weight = planes_in(matrix_file(tmp_path, "Q5_K"))
    x, bias = torch.randn(3, 256, device=DEVICE), torch.randn(40, device=DEVICE)
    y = multiply(x, weight, Kind.GATED, finish=Finish(activation, bias), gated=activation != "none")
    expected = x @ weight.unpacked(torch.float32).T + bias
    if activation != "none":
        gate, up = expected.chunk(2, -1)
        expected = up * (torch.nn.functional.silu(gate) if activation == "silu" else _gelu(gate))
    torch.testing.assert_close(y, expected, atol=2e-3, rtol=1e-3)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_rows_are_read_one_by_one(tmp_path: Path, kind: str) -> None:
    """As an embedding is."""
    file = matrix_file(tmp_path, kind)
    tokens = torch.tensor([39, 0, 7, 7, 19], device=DEVICE)
    found = written_out(planes_in(file), torch.float32, tokens)
    assert torch.equal(found.cpu(), file.tensor("m.weight")[tokens.cpu()])


def test_rows_of_several_types_stand_one_below_the_other(tmp_path: Path) -> None:
    """In their order, as one matrix for each type."""
    rows, files = PackedRows(), []
    for kind in ("Q4_K", "Q4_K", "Q6_K"):
        (tmp_path / str(len(files))).mkdir()
        file = read_gguf(
            write_gguf(tmp_path / str(len(files)) / "one.gguf", {}, {"m.weight": quantised(torch.randn(16, 256), kind)})
        )
        files.append(file)
    tables = [rows.table(planes_in(file)) for file in files]
    tables[0] = tables[0].flip(0)
    found = rows.matrix(torch.cat(tables))
    assert isinstance(found, Stacked) and [piece.shape[0] for piece in found.pieces] == [32, 16]
    wanted = [file.tensor("m.weight") for file in files]
    whole = torch.cat([wanted[0].flip(0), *wanted[1:]])
    assert torch.equal(torch.cat([piece.unpacked(torch.float32).cpu() for piece in found.pieces]), whole)
    x, bias = torch.randn(3, 256), torch.randn(48)
    y = multiply(x.to(DEVICE), found, Kind.GATED, finish=Finish("silu", bias.to(DEVICE)))
    gate, up = (x @ whole.T + bias).chunk(2, -1)
    torch.testing.assert_close(y.cpu(), torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=1e-3)


def fast_decoder(path: Path, numerics: str = "fast") -> FastDecoder:
    """The decoder that dtype="stored" opens on a device, with activations of 32 bits."""
    config, file = lean_config(path), read_gguf(path)
    source, rows = planes_source(file, DEVICE, torch.float32)
    weights = read_weights(source, config, dtype=torch.float32, device=DEVICE)
    return FastDecoder(config, replace(weights, rows=rows), numerics=numerics)


@pytest.mark.parametrize(("kinds", "arch"), [(MIXES[0], "qwen2"), (Q4_K_M, "llama")], ids=["blocks of 32", "Q4_K_M"])
def test_a_model_is_its_dequantised_twin(tmp_path: Path, kinds: dict[str, str], arch: str) -> None:
    """Embedding, joined matrices of two types, llama.cpp's order of rotary rows, a tied head and another."""
    path = model_file(tmp_path, kinds, arch)
    fast, eager = fast_decoder(path), load_model(str(path), dtype="float32", device=str(DEVICE), fast=False)
    tree = TokenTree.of_rows([([3, 4, 5, 6], [-1, 0, 0, 1])], DEVICE)
    cache = fast.new_cache(1)
    cache.reserve(4)
    logits, _ = fast.forward(tree.tokens, fast.step_of(tree, cache))
    torch.testing.assert_close(logits, eager.score(tree, eager.new_cache(1)).logits, atol=3e-3, rtol=1e-3)


@pytest.mark.parametrize("kinds", [*MIXES, {"": "Q8_0"}], ids=lambda kinds: " ".join(kinds.values()))
def test_memory_is_that_of_the_file(tmp_path: Path, kinds: dict[str, str]) -> None:
    path = model_file(tmp_path, kinds)
    file, weights = read_gguf(path), fast_decoder(path).weights
    entries = [file.tensors[name] for name in stored_matrices(file)]
    large = [matrix for layer in weights.layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert all(isinstance(matrix, Planes | Stacked) for matrix in [*large, weights.embedding])
    assert weights.head is weights.embedding, "a tied head is kept once"
    found = sum(matrix.nbytes for matrix in [*large, weights.embedding])
    assert found <= 1.1 * sum(entry.end - entry.start for entry in entries)


def test_what_has_no_planes_is_made_16_bits_and_named(tmp_path: Path) -> None:
    path = model_file(tmp_path, {"": "Q8_0", "attn_v": "F32", "ffn_down": "F16"})
    with pytest.warns(UserWarning, match=r"2 of F16, 2 of F32, 4 of Q8_0 among its matrices are multiplied in 16 bits"):
        fast = fast_decoder(path)
    layer = fast.weights.layers[0]
    assert isinstance(layer.qkv, torch.Tensor) and isinstance(layer.down, torch.Tensor) and isinstance(layer.gate_up, Planes)


def test_matrices_of_checkpoints_are_still_one(tmp_path: Path) -> None:
    """A table of rows of one form makes no pieces."""
    rows = PackedRows()
    pieces = [Packed(torch.zeros(8, 64, dtype=torch.int8), torch.ones(1, 8)) for _ in range(2)]
    assert isinstance(rows.matrix(torch.cat([rows.table(piece) for piece in pieces])), Packed)


def test_latents_and_odd_heads_are_named() -> None:
    from outrider.models.random_decoder import tiny_config

    shapes: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert not why_not_on_gpu(tiny_config("llama", **shapes))
    assert not why_not_on_gpu(tiny_config("mixtral", **shapes, num_local_experts=4))
    assert "latent attention in the blocks of a file" in why_not_on_gpu(tiny_config("deepseek_v3"))
    odd = tiny_config("llama", **{**shapes, "head_dim": 24})
    assert "heads of 24 in the blocks of a file" in why_not_on_gpu(odd)


def test_the_option_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``dtype="stored"`` on a device; any other type dequantises. The device is played by the CPU."""
    path, cpu = str(model_file(tmp_path, Q4_K_M)), torch.device("cpu")
    monkeypatch.setattr(load, "device_of", torch.device)
    monkeypatch.setattr(gpu, "runs_kernels", lambda device: True)
    monkeypatch.setattr(load, "gguf_planes", lambda config, file, device: gguf_planes(config, file, cpu))
    found = load_model(path, dtype="stored", device="cuda", max_len=100)
    assert isinstance(found, FastDecoder) and found.dtype == torch.bfloat16 and found.max_len == 100
    assert found.numerics == "fast" and isinstance(found.weights.embedding, Planes)
    assert load_model(path, dtype="stored", device="cuda", numerics="invariant").traits.is_invariant
    monkeypatch.setattr(load, "gguf_planes", lambda *_: None)
    with pytest.raises(OptionError, match=r"is not available for .*: it needs triton; use 'bfloat16'"):
        load_model(path, dtype="stored", device="cuda")
    monkeypatch.setattr(load, "why_not_on_gpu", lambda config: ["latent attention in the blocks of a file"])
    with pytest.raises(OptionError, match="the fast decoder has no latent attention in the blocks of a file; use 'bfloat16'"):
        load_model(path, dtype="stored", device="cuda")


def test_info_says_that_it_is_there(tmp_path: Path) -> None:
    path = str(model_file(tmp_path, Q4_K_M))
    assert "dtype='stored' keeps the blocks of the file" in describe_model(path).on_gpu


def test_the_mix_of_llama_cpp_keeps_two_types_in_one_matrix(tmp_path: Path) -> None:
    qkv = fast_decoder(model_file(tmp_path, Q4_K_M)).weights.layers[0].qkv
    assert isinstance(qkv, Stacked)
    assert [piece.bits for piece in qkv.pieces] == [4, 6]
