"""Mixtures of experts in GGUF files: they come back as their checkpoints, and their codes are multiplied as they are stored."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_blocks import quantised
from safetensors.torch import load_file
from test_decoder_families import make_checkpoint
from test_gguf import _byte_level, write_gguf
from test_stored_gguf import VOCAB, scores_of
from torch import Tensor

from outrider.core.tree import TokenTree
from outrider.models.gguf import hf_config, read_gguf
from outrider.models.gguf.families import BLOCK_NAMES, EXPERT_NAMES, QK_NORM_NAMES, SINK_NAMES, TOP_NAMES
from outrider.models.load import lean_config, load_model
from outrider.models.native import BUILD, NativeDecoder

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", {"num_experts": 5, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 5}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 5, "head_dim": 16, "sliding_window": 6, "intermediate_size": 32}),
    "llama": ("mixtral", {"num_local_experts": 5, "sliding_window": None}),
}
"""By llama.cpp's name."""
OURS = {theirs: ours for ours, theirs in (TOP_NAMES | BLOCK_NAMES | QK_NORM_NAMES | EXPERT_NAMES).items()}
GPT_OSS = OURS | {theirs: ours for ours, theirs in SINK_NAMES.items()} | {"mlp.router": "ffn_gate_inp"}
OF_GPT_OSS = {
    **{"attention.sliding_window": 6, "attention.key_length": 16, "rope.freq_base": 150000.0, "rope.scaling.type": "yarn"},
    **{"rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
    **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
}
MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
TREE = TokenTree.of_rows([([5, 6, 7, 8], [-1, 0, 0, 1])])


def as_converted(tensors: dict[str, Tensor], *, pairs: bool) -> dict[str, Tensor]:
    """The checkpoint under llama.cpp's names: experts of a layer in one tensor, rotary pairs next to each other in llama."""
    found, stacks = dict[str, Tensor](), defaultdict[str, dict[int, Tensor]](dict)
    for name, tensor in tensors.items():
        for theirs, ours in MIXTRAL.items():
            name = name.replace(theirs, ours)  # noqa: PLW2901
        expert = re.search(r"\.experts\.(\d+)\.", name)
        stem = re.sub(r"^model\.layers\.\d+\.|\.weight$", "", name)
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        before = "" if layer is None else f"blk.{layer[1]}."
        if expert is not None:
            at = OURS[stem.replace(f".{expert[1]}.", ".{}.")]
            stacks[f"{before}{at}.weight"][int(expert[1])] = tensor
            continue
        if pairs and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            tensor = tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)  # noqa: PLW2901
        found[f"{before}{OURS[stem]}.weight"] = tensor.contiguous()
    return found | {name: torch.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of gpt-oss under llama.cpp's names: gates and ups apart, and every matrix with its inputs last."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        layer, stem, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.|model\.)?(.*?)(?:[._](weight|bias))?", name).groups()  # pyright: ignore
        before = "" if layer is None else f"blk.{layer}."
        if stem.startswith("mlp.experts."):
            turned = tensor if kind == "bias" else tensor.transpose(1, 2)
            parts = {"gate": turned[:, ::2], "up": turned[:, 1::2]} if "gate_up" in stem else {"down": turned}
            found |= {f"{before}ffn_{part}_exps.{kind or 'weight'}": one.contiguous() for part, one in parts.items()}
        else:
            name_there = GPT_OSS.get(stem) or GPT_OSS[f"model.{stem}"]
            found[f"{before}{name_there}.{kind or 'weight'}"] = tensor.contiguous()
    return found


def coded(name: str, tensor: Tensor, kind: str) -> Any:
    """Matrices in Q8_0, routers, norms and biases in floats, as llama.cpp quantises. Experts in ``kind``."""
    if tensor.dim() == 1 or "ffn_gate_inp" in name or name.endswith("bias"):
        return tensor
    code, _, raw = quantised(tensor.flatten(0, -2), kind if "_exps" in name else "Q8_0")
    return code, tuple(tensor.shape), raw


@pytest.fixture(scope="module", params=MODELS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint, the same as GGUF in floats, and in codes with all experts chosen: rounding moves no choice."""
    arch, folder = request.param, tmp_path_factory.mktemp(request.param)
    family, changes = MODELS[arch]
    make_checkpoint(folder, family, {**SHAPE, **changes, "num_experts_per_tok": 2})
    keys = {
        **{"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 1e6 if arch == "llama" else 10000.0},
        **{"expert_count": 5, "expert_used_count": 2},
        "attention.layer_norm_rms_epsilon": 1e-6 if arch == "qwen3moe" else 1e-5,
        **({"expert_feed_forward_length": 32} if arch in ("qwen3moe", "gpt-oss") else {}),
        **(OF_GPT_OSS if arch == "gpt-oss" else {}),
    }
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()} | _byte_level()
    is_gpt_oss = arch == "gpt-oss"
    weights = load_file(folder / "model.safetensors")
    tensors = one_by_one(weights) if is_gpt_oss else as_converted(weights, pairs=arch == "llama")
    plain = write_gguf(folder / "plain.gguf", metadata, tensors)
    metadata[f"{arch}.expert_used_count"] = 5
    kind = "MXFP4" if is_gpt_oss else "Q8_0"
    codes = write_gguf(folder / "codes.gguf", metadata, {name: coded(name, tensor, kind) for name, tensor in tensors.items()})
    return folder, plain, codes


def test_a_mixture_comes_back(files: tuple[Path, Path, Path]) -> None:
    folder, plain, _ = files
    assert hf_config(read_gguf(plain))["num_experts_per_tok"] == 2
    ours, theirs = (load_model(str(path), dtype="float32", device="cpu", fast=False) for path in (plain, folder))
    torch.testing.assert_close(scores_of(ours, TREE), scores_of(theirs, TREE), atol=1e-4, rtol=0)


def test_codes_of_experts_stay(files: tuple[Path, Path, Path]) -> None:
    """In the memory of the file, and as near to the dequantised model as rounded inputs are."""
    if BUILD.wait() is None:
        pytest.skip("no C++ compiler")
    codes = files[2]
    stored, wide = (load_model(str(codes), dtype=dtype, device="cpu") for dtype in ("stored", "float32"))
    assert isinstance(stored, NativeDecoder) and isinstance(wide, NativeDecoder)
    assert stored.num_bytes < 0.35 * wide.num_bytes
    found, meant = scores_of(stored, TREE), scores_of(wide, TREE)
    assert 0 < (found - meant).norm() / meant.norm() < 0.05
    alone = scores_of(stored, TokenTree.of_rows([([5], [-1])]))
    assert torch.equal(alone[:, 0], found[:, 0])
    assert torch.equal(scores_of(load_model(str(codes), dtype="stored-exact", device="cpu"), TREE), meant)


def test_a_gpu_multiplies_experts_as_stored(files: tuple[Path, Path, Path]) -> None:
    """Interpreted kernels: experts of gpt-oss are floats of 4 bits, those of the others whole numbers of 8."""
    from triton_interpreter import DEVICE

    from outrider.models.few_bits import FewBits
    from outrider.models.gpu.decoder import FastDecoder
    from outrider.models.quantised.gguf_planes import planes_source, why_not_on_gpu
    from outrider.models.weights import read_weights

    config, file = lean_config(files[2]), read_gguf(files[2])
    unsupported = [words for words in why_not_on_gpu(config) if not words.startswith("a window of 6")]
    assert not unsupported
    source, rows = planes_source(file, DEVICE, torch.float32)
    weights = read_weights(source, config, dtype=torch.float32, device=DEVICE)
    fast = FastDecoder(config, replace(weights, rows=rows))
    layer = fast.weights.layers[0]
    assert isinstance(layer.gate_up, FewBits) and isinstance(layer.down, FewBits)
    eager = load_model(str(files[2]), dtype="float32", device=str(DEVICE), fast=False)
    chain = TokenTree.chain(torch.tensor([[5, 6, 7]], device=DEVICE))
    cache = fast.new_cache(1)
    cache.reserve(3)
    found, _ = fast.forward(chain.tokens, fast.step_of(chain, cache))
    torch.testing.assert_close(found, eager.score(chain, eager.new_cache(1)).logits, atol=3e-3, rtol=1e-3)
