"""GGUF matrices multiplied as stored (``dtype="stored"``): the arithmetic against its PyTorch reference, the same bits whatever
shares the pass, speculative text equal to plain text, and the memory of the file. Every instruction set: test_native_isa.py."""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
from quantised_blocks import WIDTHS, assert_rounded_alike, quantised
from test_gguf import CODES, _byte_level, write_gguf
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models import decoder, load
from outrider.models.config import config_of
from outrider.models.gguf import GGUFFile, read_gguf
from outrider.models.gguf.stored import (
    STORED,
    is_fast_as_stored,
    multiply,
    multiply_in_halves,
    rounded,
    row_table,
    stored_matrices,
)
from outrider.models.info import describe_model
from outrider.models.linear import Linear
from outrider.models.load import load_model
from outrider.models.native import NativeDecoder, auto_types, floats_kept, isa_here
from outrider.models.random_decoder import tiny_weights

VOCAB, HEAD_DIM, LAYERS = 267, 16, 2


@dataclass(frozen=True)
class Shape:
    """Sizes of the small model: units of 32 or, for the K types, of 256."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "context_length": 256,
            "embedding_length": self.hidden,
            "block_count": LAYERS,
            "feed_forward_length": self.mlp,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * HEAD_DIM, self.kv_heads * HEAD_DIM
        inner = {"ffn_gate": (self.mlp, self.hidden), "ffn_up": (self.mlp, self.hidden), "ffn_down": (self.hidden, self.mlp)}
        outer = {"attn_q": (q, self.hidden), "attn_k": (kv, self.hidden), "attn_v": (kv, self.hidden)}
        return outer | {"attn_output": (self.hidden, q)} | inner


SHORT = {"F16": torch.float16, "BF16": torch.bfloat16}
SMALL, LARGE = Shape(96, 160, 6, 2), Shape(256, 512, 16, 4)


def model_file(folder: Path, kinds: dict[str, str], arch: str = "qwen2") -> Path:
    """A small random model; ``kinds`` gives the storage of matrices by their stem, "" that of all others.

    Qwen2 has biases and a tied head. Llama has neither, and rows of q and k in llama.cpp's rotary order."""
    torch.manual_seed(0)
    shape = LARGE if any(WIDTHS.get(kind) == 256 for kind in kinds.values()) else SMALL
    shapes = shape.matrices

    def matrix(stem: str, shape: tuple[int, int]) -> Any:
        weights, kind = torch.randn(shape) / shape[1] ** 0.5, kinds.get(stem, kinds[""])
        if kind in SHORT:
            return CODES[kind], shape, weights.to(SHORT[kind]).view(torch.uint8).numpy().tobytes()
        return weights if kind == "F32" else quantised(weights, kind)

    tensors: dict[str, Any] = {
        "token_embd.weight": matrix("token_embd", (VOCAB, shape.hidden)),
        "output_norm.weight": torch.ones(shape.hidden),
    }
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{stem}.weight": matrix(stem, shape) for stem, shape in shapes.items()}
        biased = ("attn_q", "attn_k", "attn_v") if arch == "qwen2" else ()
        tensors |= {f"blk.{layer}.{stem}.bias": torch.randn(shapes[stem][0]) / 4 for stem in biased}
        tensors |= {f"blk.{layer}.{stem}.weight": torch.rand(shape.hidden) + 0.5 for stem in ("attn_norm", "ffn_norm")}
    if arch == "llama":
        tensors["output.weight"] = matrix("output", (VOCAB, shape.hidden))
    keys = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in shape.keys.items()}
    return write_gguf(folder / "m.gguf", keys | _byte_level(), tensors)


Q4_K_M = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
"""What llama.cpp's Q4_K_M mixes, in half of the layers."""


def head_alone(library: ctypes.CDLL, file: GGUFFile, sizes: Tensor) -> NativeDecoder:
    """A model whose logits of a state of 1 and -1 are the product of the head with ``sizes`` of those signs, exactly: the root
    mean square is 1, and ``sizes`` are the weights of the norm."""
    head = row_table(file.tensors["output.weight"])
    shape = {
        "hidden_size": len(sizes),
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = config_of({"model_type": "llama", "vocab_size": len(head), "num_hidden_layers": 1, **shape})
    assert config is not None
    weights = replace(tiny_weights(config, seed=0), norm=sizes, head=head, file=file)
    return NativeDecoder(library, replace(config, norm_eps=0.0), weights)


@pytest.mark.parametrize("units", [1, 3, 19])
@pytest.mark.parametrize("kind", STORED)
def test_a_product_is_the_reference(library, tmp_path: Path, kind: str, units: int) -> None:
    """Outputs that fill no block, inputs of very different sizes, any number of rows: a row's bits are its own."""
    torch.manual_seed(1)
    inputs = WIDTHS[kind] * (units if WIDTHS[kind] == 32 else min(units, 3))
    file = read_gguf(write_gguf(tmp_path / "one.gguf", {}, {"output.weight": quantised(torch.randn(73, inputs) + 0.3, kind)}))
    sizes = torch.randn(inputs) * torch.logspace(-3, 3, inputs)
    sizes[:32] *= 0.0 if inputs > 32 else 1.0
    model, signs = head_alone(library, file, sizes), torch.randint(0, 2, (67, inputs)).float() * 2 - 1
    expected, found = multiply(signs * sizes, file.rows("output.weight"), kind), model.logits(signs)
    assert (found - expected).abs().max() <= 1e-6 * rounded(sizes).abs().sum()
    assert (signs * sizes - rounded(signs * sizes)).abs().max() > 1e-4 * sizes.abs().max(), "the inputs are rounded"
    for count in (1, 2, 3, 4, 5, 16, 64):
        assert torch.equal(model.logits(signs[:count]), found[:count]), f"{count} rows"
    assert torch.equal(model.logits(signs[40:43]), found[40:43])


@final
class RoundedInputs(Linear):
    """The reference of a stored matrix: float inputs, rounded, times the dequantised weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, 0.0 if bias is None else bias

    def __call__(self, x: Tensor) -> Tensor:
        return (rounded(x) @ self._weight.double().T).float() + self._bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


def scores_of(model: Target, tree: TokenTree) -> Tensor:
    cache = model.new_cache(tree.batch_size)
    model.prefill([[(7 * i + row) % VOCAB for i in range(20 + row)] for row in range(tree.batch_size)], cache)
    return model.score(tree, cache).logits


KINDS = [{"": kind} for kind in STORED] + [Q4_K_M]
SHARED = [*KINDS, {"": "F16"}]


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: " ".join(kinds.values()))
def test_a_model_is_the_reference(library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds, arch: str) -> None:
    """Every matrix, the head included: that of PyTorch with rounded inputs, and not that without. Where two sums differ in the
    last bit, an input may be rounded to the other side, and all that follows with it; in most rows none is."""
    path = str(model_file(tmp_path, kinds, arch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = load_model(path, dtype="stored", device="cpu")
    exact = load_model(path, dtype="float32", device="cpu", fast=False)
    monkeypatch.setattr(decoder, "linear_of", lambda weight, bias=None, **_: RoundedInputs(weight, bias))
    reference = load_model(path, dtype="float32", device="cpu", fast=False)
    assert isinstance(stored, NativeDecoder)
    assert_rounded_alike(stored, reference, exact, most=0.05)


@pytest.mark.parametrize("kinds", SHARED, ids=lambda kinds: " ".join(kinds.values()))
def test_scores_do_not_depend_on_what_shares_the_pass(library, tmp_path: Path, kinds) -> None:
    """Bit for bit: 1, 4, 16 nodes and more, a chain or a tree, one row or three."""
    model = load_model(str(model_file(tmp_path, kinds)), dtype="stored", device="cpu")
    tokens, cache, alone = [(11 * i) % VOCAB for i in range(70)], model.new_cache(1), list[Tensor]()
    for token in tokens:
        alone.append(model.score(TokenTree.chain(torch.tensor([[token]])), cache).logits[0])
        cache.commit([[0]])
    for width in (2, 3, 4, 5, 16, 33, 65, 70):
        logits = model.score(TokenTree.chain(torch.tensor([tokens[:width]])), model.new_cache(1)).logits[0]
        assert torch.equal(logits, torch.cat(alone[:width])), f"{width} nodes"
    trees = [([*tokens[:3], 1, 2], [-1, 0, 1, 0, 3]), (tokens[:2], [-1, 0]), ([4, *tokens[:9]], [-1, *range(9)])]
    together = model.score(TokenTree.of_rows(trees), model.new_cache(3)).logits
    assert torch.equal(together[0, :3], torch.cat(alone[:3])) and torch.equal(together[1, :2], torch.cat(alone[:2]))


@pytest.mark.parametrize("kinds", SHARED, ids=lambda kinds: " ".join(kinds.values()))
def test_float_inputs_have_the_bits_of_float32(library, tmp_path: Path, kinds) -> None:
    """Of 1 to 70 nodes, in no more memory than with rounded inputs. Dequantised weights are the reference."""
    path = str(model_file(tmp_path, kinds))
    exact, stored, wide = (load_model(path, dtype=dtype, device="cpu") for dtype in ("stored-exact", "stored", "float32"))
    assert isinstance(exact, NativeDecoder) and isinstance(stored, NativeDecoder) and isinstance(wide, NativeDecoder)
    assert exact.num_bytes == stored.num_bytes < 0.6 * wide.num_bytes
    for count in (1, 2, 3, 4, 5, 17, 70):
        tree = TokenTree.chain(torch.arange(count)[None] % VOCAB)
        assert torch.equal(scores_of(exact, tree), scores_of(wide, tree)), f"{count} nodes"


MIXES = [{"": "Q4_1", "ffn_down": "Q8_0", "attn_output": "Q4_0"}, Q4_K_M]


@pytest.mark.parametrize("kinds", MIXES, ids=lambda kinds: " ".join(kinds.values()))
@pytest.mark.parametrize("method", ["prompt-lookup", "draft-model"])
def test_speculative_text_is_plain_text(library, tmp_path: Path, method: str, kinds) -> None:
    path = str(model_file(tmp_path, kinds))
    (tmp_path / "draft").mkdir()
    draft = str(model_file(tmp_path / "draft", {"": "Q4_0"})) if method == "draft-model" else None
    llm = LLM(path, dtype="stored", device="cpu", method=method, draft=draft)
    assert isinstance(llm.target, NativeDecoder)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
        texts = [llm.generate([[1, 2, 3, 1, 2]], params, method=llm.compose(name))[0].token_ids for name in ("plain", method)]
        assert texts[0] == texts[1] and len(texts[0]) == 40


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: " ".join(kinds.values()))
def test_memory_is_that_of_the_file(library, tmp_path: Path, kinds) -> None:
    path = model_file(tmp_path, kinds)
    file, model = read_gguf(path), load_model(str(path), dtype="stored", device="cpu")
    assert isinstance(model, NativeDecoder)
    stored = [file.tensors[name] for name in stored_matrices(file)]
    assert len(stored) == 1 + 7 * LAYERS
    assert model.num_bytes <= 1.1 * sum(entry.end - entry.start for entry in stored)


@pytest.mark.parametrize("kind", STORED)
def test_the_embedding_is_read_row_by_row(library, tmp_path: Path, kind: str) -> None:
    path = model_file(tmp_path, {"": kind})
    file, model = read_gguf(path), load_model(str(path), dtype="stored", device="cpu")
    assert isinstance(model, NativeDecoder)
    tokens = torch.tensor([[0, 5, VOCAB - 1], [7, 7, 100]])
    wanted = file.tensor("token_embd.weight")[tokens]
    assert (model.embed(tokens) - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_other_types_are_dequantised_and_named(library, tmp_path: Path) -> None:
    """Joined matrices stay all or none; the embedding is the head here."""
    path = model_file(tmp_path, {"": "Q8_0", "attn_v": "F32", "attn_output": "Q4_0", "token_embd": "F32"})
    with pytest.warns(UserWarning, match=r"3 of F32, 4 of Q8_0 among its matrices are multiplied in float32"):
        model = load_model(str(path), dtype="stored", device="cpu")
    names = stored_matrices(read_gguf(path))
    assert {name.split(".")[2] for name in names} == {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    tree = TokenTree.of_rows([([5, 6], [-1, 0])])
    found, wide = (scores_of(one, tree) for one in (model, load_model(str(path), dtype="float32", device="cpu")))
    assert 0 < (found - wide).norm() / wide.norm() < 0.05


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_bfloat16_stays_and_has_the_scores_of_float32(library, tmp_path: Path, arch: str) -> None:
    """Inputs are not rounded for it: widening is exact, whatever shares the pass. Qwen2's head is the embedding."""
    path = model_file(tmp_path, {"": "BF16"}, arch)
    model, wide = (load_model(str(path), dtype=dtype, device="cpu") for dtype in ("stored", "float32"))
    assert isinstance(model, NativeDecoder) and isinstance(wide, NativeDecoder)
    assert wide.num_bytes == model.num_bytes * (1 if isa_here().reads_halves else 2), (
        "float32 packs what was widened in 16 bits"
    )
    tree = TokenTree.of_rows([(list(range(7)), [-1, 0, 0, 1, 2, 3, 3])])
    found = scores_of(model, tree)
    assert torch.equal(found, scores_of(wide, tree))
    assert torch.equal(scores_of(model, TokenTree.of_rows([([0], [-1])]))[:, 0], found[:, 0])


@pytest.mark.parametrize("inputs", [32, 80, 320])
@pytest.mark.parametrize("largest", [511.0, 512.0])
def test_products_of_halves_are_the_reference(library, tmp_path: Path, inputs: int, largest: float) -> None:
    """Bit for bit, for any number of rows, where the processor adds in 16 bits; a weight of 512 might overflow, so floats are
    added then."""
    torch.manual_seed(2)
    weights = torch.randn(73, inputs).half()
    weights[5, 7] = largest
    matrix = CODES["F16"], (73, inputs), weights.view(torch.uint8).numpy().tobytes()
    file = read_gguf(write_gguf(tmp_path / "one.gguf", {}, {"output.weight": matrix}))
    sizes = torch.randn(inputs) * torch.logspace(-3, 3, inputs)
    model, signs = head_alone(library, file, sizes), torch.randint(0, 2, (67, inputs)).float() * 2 - 1
    found, exact = model.logits(signs), (signs * sizes).double() @ weights.double().T
    error = (found - exact).norm() / exact.norm()
    if isa_here().adds_halves and largest < 512:
        assert torch.equal(found, multiply_in_halves(signs * sizes, weights)) and 1e-5 < error < 1e-3
    else:
        assert error < 1e-6
    for count in (1, 2, 3, 4, 5, 16, 64):
        assert torch.equal(model.logits(signs[:count]), found[:count]), f"{count} rows"


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_auto_keeps_16_bits_where_the_processor_is_fast_in_them(library, tmp_path: Path, kind: str) -> None:
    """Scores are the bits of float32, but for F16 where products are added in 16 bits."""
    path = str(model_file(tmp_path, {"": kind}))
    auto = load_model(path, dtype="auto", device="cpu")
    wide, tree = load_model(path, dtype="float32", device="cpu"), TokenTree.of_rows([([5, 6], [-1, 0])])
    assert isinstance(auto, NativeDecoder) and isinstance(wide, NativeDecoder)
    found, wanted = scores_of(auto, tree), scores_of(wide, tree)
    stays, is_short = kind in floats_kept(), torch.bfloat16 in auto_types()
    both_are_short = kind == "BF16" and isa_here().reads_halves
    assert (2 * auto.num_bytes == wide.num_bytes) == ((stays or is_short) and not both_are_short)
    assert torch.equal(found, wanted) == (not (kind == "F16" and isa_here().adds_halves if stays else is_short))
    assert (found - wanted).norm() < 1e-2 * wanted.norm()
    assert describe_model(path).on_cpu.startswith("as stored" if stays else "in bfloat16")


def test_floats_of_16_bits_are_joined_with_their_own_type_only(tmp_path: Path) -> None:
    names = stored_matrices(read_gguf(model_file(tmp_path, {"": "F16", "attn_v": "Q8_0", "ffn_up": "BF16"})))
    assert {name.split(".")[-2] for name in names} == {"attn_output", "ffn_down", "token_embd"}


def test_auto_takes_a_quantised_file_as_stored(library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every matrix stays; with a matrix of floats or without the native pass it is dequantised."""
    path = str(model_file(tmp_path, Q4_K_M))
    tree = TokenTree.of_rows([([5, 6], [-1, 0])])
    stored, auto, wide = (load_model(path, dtype=dtype, device="cpu") for dtype in ("stored", "auto", "float32"))
    assert torch.equal(scores_of(auto, tree), scores_of(stored, tree))
    assert not torch.equal(scores_of(auto, tree), scores_of(wide, tree))
    assert describe_model(path).on_cpu.startswith("as stored, activations rounded to 8 bits")
    assert torch.equal(scores_of(load_model(path, device="cpu", page_len=16), tree), scores_of(stored, tree))
    monkeypatch.setattr(load, "native_decoder", lambda *_, **__: None)
    assert torch.isfinite(scores_of(load_model(path, device="cpu"), tree)).all()
    mixed = model_file(tmp_path, {"": "Q8_0", "token_embd": "F32"})
    assert not is_fast_as_stored(read_gguf(mixed), floats=("F16", "BF16")) and describe_model(str(mixed)).on_cpu.startswith(
        "in bfloat16"
    )


def test_where_it_is_not_available_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"'stored' is not available for .*not a GGUF file; use 'auto', or 'int8'"):
        load_model(str(bundled_path("target")), dtype="stored", device="cpu")
    path = str(model_file(tmp_path, {"": "Q8_0"}))
    with pytest.raises(OptionError, match="use device='cpu' or 'cuda', and fast=True"):
        load_model(path, dtype="stored", device="cpu", fast=False)
    with pytest.raises(OptionError, match="'stored-exact' is not available on this device; use device='cpu'"):
        load_model(path, dtype="stored-exact", device="meta")
    with pytest.raises(OptionError, match="did you mean 'stored'"):
        load_model(path, dtype="storde", device="cpu")
    monkeypatch.setattr(load, "native_decoder", lambda *_, **__: None)
    with pytest.raises(OptionError, match=r"it needs a C\+\+ compiler"):
        load_model(path, dtype="stored", device="cpu")
