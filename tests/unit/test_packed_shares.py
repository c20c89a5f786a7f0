"""Matrices of few bits divided for GPUs, interpreted: the codes and scales of the whole, and a model's scores."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_stored_gguf
import torch
from divided import checkpoint as float_checkpoint
from mxfp4_checkpoint import in_mxfp4
from quantised_blocks import quantised
from quantised_checkpoints import quantise_folder
from test_decoder_families import FAMILIES, make_checkpoint
from test_gguf import write_gguf
from test_shared_round import PAGE_LEN, InTurn, Turns
from test_shares import LATENT
from test_stored_gguf import Shape, model_file
from torch import Tensor
from triton_interpreter import DEVICE

from outrider.core.errors import OptionError
from outrider.core.tree import TokenTree
from outrider.models.config import ModelConfig
from outrider.models.decoder_weights import Weights
from outrider.models.few_bits import FewBits, with_inputs
from outrider.models.gguf import read_gguf
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.load import lean_config, load_model
from outrider.models.packed import Matrices, Matrix, Stacked, matrices_of
from outrider.models.parallel.stored import packed_share, rounded_share
from outrider.models.parallel.units import Units, units_of
from outrider.models.quantised.gguf_planes import planes_of
from outrider.models.share import Share
from outrider.models.weights import SafetensorsFolder, read_weights

SIZE = 2
GPU = torch.device("cuda")


def folder_of(folder: Path, kind: str) -> Path:
    """A small model of one layer, whose MLP has three groups of 32 columns for two ranks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "tie_word_embeddings": False}
    if kind == "mxfp4":
        model_type, changes = FAMILIES["gpt-oss"]
        make_checkpoint(folder, model_type, {**changes, **sizes, "num_local_experts": 4, "layer_types": ["full_attention"]})
        in_mxfp4(folder)
    else:
        make_checkpoint(folder, "llama", sizes)
        quantise_folder(folder, kind)
    return folder


def gguf_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four storage types, two of them in one matrix, and an embedding that stays as stored."""
    monkeypatch.setattr(test_stored_gguf, "SMALL", Shape(64, 96, 4, 2))
    monkeypatch.setattr(test_stored_gguf, "LAYERS", 1)
    return model_file(folder, {"": "Q4_0", "attn_v": "Q8_0", "ffn_down": "Q5_1", "token_embd": "Q8_0"})


def latents_of(folder: Path) -> Path:
    """Latent attention with experts and an MLP beside them, in floats."""
    changes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "num_hidden_layers": 1, "attention_bias": False}
    return Path(float_checkpoint(folder / "latents", model_type="deepseek_v3", mlp_bias=False, **{**LATENT, **changes}))


def shares_of(path: Path, config: ModelConfig, units: Units) -> list[Weights]:
    shares = [Share(rank, SIZE, units.columns) for rank in range(SIZE)]
    if config.latent is not None:
        options: dict[str, Any] = {"dtype": torch.float32, "device": DEVICE}
        return [read_weights(SafetensorsFolder(path), config, **options, share=share) for share in shares]
    return [packed_share(path, config, share, DEVICE, torch.float32) for share in shares]


def unpacked(matrix: Matrix) -> Tensor:
    if isinstance(matrix, Stacked):
        return torch.cat([unpacked(piece) for piece in matrix.pieces])
    return matrix if isinstance(matrix, Tensor) else matrix.unpacked(torch.float32)


def assert_parts(parts: Sequence[Matrices], whole: Matrices, columns: int) -> None:
    """Inputs of all ranks side by side are those of the whole; each rank has its part of gates and ups."""
    for layer, of_ranks in zip(whole.layers, zip(*(part.layers for part in parts), strict=True), strict=True):
        for name in ("out", "down"):
            assert torch.equal(torch.cat([unpacked(vars(each)[name]) for each in of_ranks], 1), unpacked(vars(layer)[name]))
        pairs = [unpacked(each.gate_up).chunk(2) for each in of_ranks]
        assert torch.equal(torch.cat([each for pair in zip(*pairs, strict=True) for each in pair]), unpacked(layer.gate_up))
        assert all(len(gate) % columns == 0 for gate, _ in pairs)
    assert torch.equal(torch.cat([unpacked(part.head) for part in parts]), unpacked(whole.head))


@pytest.mark.parametrize("kind", ["gptq", "gptq-8bit-symmetric", "int8-channel", "fp8-channel"])
def test_codes_and_scales_of_ranks_are_those_of_the_whole(tmp_path: Path, kind: str) -> None:
    path = folder_of(tmp_path, kind)
    config = lean_config(path)
    units = units_of(path, config, SIZE, "stored", GPU, fast=True)
    whole = packed_share(path, config, Share(0, 1), DEVICE, torch.float32)
    parts = [matrices_of(part, 16) for part in shares_of(path, config, units)]
    assert all(isinstance(part.layers[0].down, FewBits) for part in parts)
    assert_parts(parts, matrices_of(whole, 16), units.columns)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_model_is_rounded_before_it_is_divided(tmp_path: Path, bits: int) -> None:
    changes = {"attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1, "intermediate_size": 384}
    path = Path(float_checkpoint(tmp_path / "m", **changes, num_attention_heads=16, hidden_size=128))
    config, units = lean_config(path), units_of(path, lean_config(path), SIZE, f"int{bits}", GPU, fast=True)
    shares = [Share(0, 1)] + [Share(rank, SIZE, units.columns) for rank in range(SIZE)]
    whole, *parts = (
        matrices_of(rounded_share(SafetensorsFolder(path), config, share, bits, DEVICE, torch.float32), bits)
        for share in shares
    )
    assert isinstance(whole.layers[0].down, FewBits) and whole.layers[0].down.bits == bits
    assert_parts(parts, whole, units.columns)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_experts_are_rounded_before_they_are_divided(tmp_path: Path, bits: int) -> None:
    """Experts, the MLP beside them and latents: their parts add up to those of one process."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "n_shared_experts": 1, "num_hidden_layers": 1}
    changes = {**LATENT, **sizes, "first_k_dense_replace": 0, "attention_bias": False, "qk_rope_head_dim": 16, "v_head_dim": 64}
    path = Path(float_checkpoint(tmp_path / "m", model_type="deepseek_v3", mlp_bias=False, **changes))
    config, units = lean_config(path), units_of(path, lean_config(path), SIZE, f"int{bits}", GPU, fast=True)
    shares = [Share(0, 1)] + [Share(rank, SIZE, units.columns) for rank in range(SIZE)]
    whole, *parts = (
        matrices_of(rounded_share(SafetensorsFolder(path), config, share, bits, DEVICE, torch.float32), bits).layers[0]
        for share in shares
    )
    for name in ("out", "down", "shared_down"):
        matrix = getattr(whole, name)
        assert isinstance(matrix, FewBits) and matrix.bits == bits, name
        assert torch.equal(torch.cat([unpacked(getattr(part, name)) for part in parts], 1), unpacked(matrix)), name
    for name, count in (("gate_up", 4), ("shared_gate_up", 1)):
        pairs = [unpacked(getattr(part, name)).view(count, 2, -1, 128) for part in parts]
        assert torch.equal(torch.cat(pairs, 2).flatten(0, 2), unpacked(getattr(whole, name))), name


@pytest.mark.parametrize("kind", ["gptq", "mxfp4", "gguf", "latents"])
def test_two_ranks_have_the_scores_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Kernels of GPUs on both ranks, in threads that meet at the sums, against the dequantised model."""
    path = gguf_of(tmp_path, monkeypatch) if kind == "gguf" else None
    path = path or (latents_of(tmp_path) if kind == "latents" else folder_of(tmp_path, kind))
    config, dtype = lean_config(path), "float32" if kind == "latents" else "stored"
    units = units_of(path, config, SIZE, dtype, GPU, fast=True)
    turns, ranks = Turns(SIZE), list[FastDecoder]()
    for rank, weights in enumerate(shares_of(path, config, units)):
        joint = InTurn(turns, rank, [Share(other, SIZE).span(config.vocab_size) for other in range(SIZE)])
        part = replace(Share(rank, SIZE, units.columns).config(config), vocab_size=config.vocab_size)
        ranks.append(FastDecoder(part, weights, numerics="invariant", page_len=PAGE_LEN, joint=joint))
    chain = TokenTree.chain(torch.tensor([[3, 4, 5]], device=DEVICE))

    def run(rank: int) -> Tensor:
        with turns.turn, torch.inference_mode():
            cache = ranks[rank].new_cache(1)
            cache.reserve(3)
            return ranks[rank].forward(chain.tokens, ranks[rank].step_of(chain, cache))[0]

    with ThreadPoolExecutor(SIZE) as threads:
        found = torch.cat(list(threads.map(run, range(SIZE))), -1)
    eager = load_model(str(path), dtype="float32", device=str(DEVICE), fast=False)
    torch.testing.assert_close(found, eager.score(chain, eager.new_cache(1)).logits, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_1"])
def test_some_inputs_of_planes(tmp_path: Path, kind: str) -> None:
    weights = torch.randn(40, 768, generator=torch.Generator().manual_seed(0))
    file = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"m.weight": quantised(weights, kind)}))
    planes = planes_of(file.rows("m.weight"), file.tensors["m.weight"])
    for begin, end in ((0, 256), (256, 768)):
        assert torch.equal(
            with_inputs(planes, begin, end).unpacked(torch.float32), planes.unpacked(torch.float32)[:, begin:end]
        )
    with pytest.raises(OptionError, match=f"{planes.unit} inputs that must stay together"):
        with_inputs(planes, 16, 768)


def test_groups_that_ranks_would_cut_are_named(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "gptq")
    narrow = replace(lean_config(path), mlp_size=32)
    with pytest.raises(OptionError, match="its MLP columns do not come in groups of 32 for every rank"):
        units_of(path, narrow, SIZE, "stored", GPU, fast=True)
    with pytest.raises(OptionError, match="its heads do not come in groups of 32"):
        units_of(path, lean_config(path), 4, "stored", GPU, fast=True)
    with pytest.raises(OptionError, match="ranks of GPUs do not round inputs"):
        units_of(path, lean_config(path), SIZE, "w8a8", GPU, fast=True)
    assert units_of(path, lean_config(path), SIZE, "bfloat16", GPU, fast=True) == Units()
