"""``dtype="int4"`` and ``"w8a8"`` on a CPU: nearest codes, products of stored matrices, speculative text that is plain text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_decoder_families import make_checkpoint
from test_stored_gguf import RoundedInputs
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.errors import OptionError
from outrider.core.tree import TokenTree
from outrider.models import decoder, experts
from outrider.models.dtypes import FEW_BITS
from outrider.models.linear import Linear
from outrider.models.load import load_model
from outrider.models.native import BUILD, NativeDecoder
from outrider.models.quantised.weight_rounding import round_to_codes

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
VOCAB = 96
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1], "head_dim": 16}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if BUILD.wait() is None:
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_gets_the_nearest_code(bits: int) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(3)) * 0.1
    weight[3, 32:64] = 0.0
    found = round_to_codes(weight, bits)
    lowest = -(1 << (bits - 1))
    every = torch.arange(lowest, -lowest)
    choices = found.spread(found.scales).float()[..., None] * every
    nearest = (choices - weight[..., None]).abs().amin(-1)
    apart = (found.dequantised() - weight).abs()
    torch.testing.assert_close(apart, nearest, rtol=0, atol=1e-6)
    assert int(found.codes.amin()) == lowest and not found.dequantised()[3, 32:64].any()


def test_the_farthest_weight_of_a_group_is_kept() -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(4))
    farthest = weight.abs().argmax(1, keepdim=True)
    found = round_to_codes(weight, 4).dequantised()
    torch.testing.assert_close(found.gather(1, farthest), weight.gather(1, farthest), rtol=1e-3, atol=0)


@dataclass(frozen=True)
class Reference:
    """Linears of the native pass in PyTorch: rounded weights, 8 bits at the head, times rounded inputs."""

    bits: int

    def __call__(self, weight: Tensor, bias: Tensor | None = None, **_: object) -> Linear:
        return RoundedInputs(round_to_codes(weight, 8 if len(weight) == VOCAB else self.bits).dequantised(), bias)


@dataclass(frozen=True)
class ReferenceOfExperts:
    """The products of experts in the same way; the router's stays as it is."""

    bits: int

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) if len(weight) == EXPERTS["num_experts"] else Reference(self.bits)(weight, bias)(x)


def folder_of(folder: Path, family: str = "llama", **changes: Any) -> str:
    """A small model whose numbers all fit into 16 bits."""
    make_checkpoint(folder, family, {**SHAPE, **changes})
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


MODELS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "experts": {"family": "qwen3_moe", **EXPERTS},
}


@pytest.mark.parametrize(
    ("dtype", "kind"), [("int4", "tied"), ("int4", "llama"), ("w8a8", "llama"), ("int4", "experts"), ("w8a8", "experts")]
)
def test_a_model_is_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str) -> None:
    path = folder_of(tmp_path, **MODELS[kind])
    rounded, exact = load_model(path, dtype=dtype, device="cpu"), load_model(path, dtype="float32", device="cpu", fast=False)
    monkeypatch.setattr(decoder, "linear_of", Reference(FEW_BITS[dtype]))
    monkeypatch.setattr(experts, "F", ReferenceOfExperts(FEW_BITS[dtype]))
    reference = load_model(path, dtype="float32", device="cpu", fast=False)
    assert isinstance(rounded, NativeDecoder)
    tree = TokenTree.of_rows([([row, row + 30, row + 60], [-1, 0, 0]) for row in range(20)])
    found, wanted, unrounded = (model.score(tree, model.new_cache(20)).logits for model in (rounded, reference, exact))
    apart = (found - wanted).flatten(1).norm(dim=1) / (unrounded - wanted).flatten(1).norm(dim=1)
    assert apart.median() < 0.01
    assert (unrounded - wanted).norm() / wanted.norm() > 1e-3


def test_a_model_takes_the_memory_of_its_codes(tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    rounded, short = (load_model(path, dtype=dtype, device="cpu") for dtype in ("int4", "bfloat16"))
    assert isinstance(rounded, NativeDecoder) and isinstance(short, NativeDecoder)
    head = VOCAB * SHAPE["hidden_size"]
    assert rounded.num_bytes == (short.num_bytes // 2 - head) * 18 // 32 + head * 34 // 32


@pytest.mark.parametrize(("dtype", "temperature"), [("int4", 0.0), ("int4", 1.0), ("w8a8", 1.0)])
def test_speculative_text_is_plain_text(dtype: str, temperature: float) -> None:
    llm, params = LLM(dtype=dtype, device="cpu"), SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    assert isinstance(llm.target, NativeDecoder)
    names = ("plain", "draft-model", "best-first")
    texts = [llm.generate("Once upon a time", params, method=llm.compose(name))[0].token_ids for name in names]
    assert texts[0] == texts[1] == texts[2]


def test_without_the_native_pass_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"int4.*on a CPU it needs the native pass"):
        load_model(folder_of(tmp_path / "few"), dtype="int4", device="cpu", fast=False)
    with pytest.raises(OptionError, match=r"w8a8.*the native pass of a CPU.*int8"):
        load_model(folder_of(tmp_path / "eight"), dtype="w8a8", device="cpu", fast=False)
