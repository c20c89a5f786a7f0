"""Quantised folders as stored on a CPU: no number changes, a node's bits are its own, speculative text is plain text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from quantised_blocks import assert_rounded_alike
from quantised_checkpoints import FORMS, quantise_folder
from safetensors.torch import load_file, save_file
from test_decoder_families import make_checkpoint
from test_stored_gguf import RoundedInputs
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.core.tree import TokenTree
from outrider.models import decoder
from outrider.models.gguf.quants import STORAGE_TYPES, dequantise
from outrider.models.info import describe_model
from outrider.models.linear import Linear, PlainLinear
from outrider.models.load import load_model
from outrider.models.native import NativeDecoder
from outrider.models.quantised.formats import format_of
from outrider.models.quantised.matrix import Quantised
from outrider.models.quantised.stored import rows_of, type_of

TYPES = {
    "gptq": "Q4_Z",
    "gptq-symmetric": "Q4_0",
    "gptq-8bit": "Q8_F",
    "gptq-8bit-symmetric": "Q8_0",
    "gptq-channel": "Q4_Z",
    "awq": "Q4_Z",
    "int4-group": "Q4_0",
    "int4-asymmetric": "Q4_Z",
    "int8-packed": "Q8_0",
    "int8-asymmetric": "Q8_F",
    "bnb-int8": "Q8_F",
}
"""The type that holds every form."""
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
VOCAB = 96


def folder_of(folder: Path, kind: str, dtype: torch.dtype = torch.float16, *, tied: bool = False) -> str:
    """A small model, quantised, with its other tensors in ``dtype``."""
    make_checkpoint(folder, "llama", {**SHAPE, "tie_word_embeddings": tied})
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if kind:
        quantise_folder(folder, kind)
    return str(folder)


def matrix_of(kind: str) -> Quantised:
    settings, write = FORMS[kind]
    tensors, _ = write("m", torch.randn(24, 128, generator=torch.Generator().manual_seed(3)) * 0.1)
    form = format_of({"quantization_config": settings})
    assert form is not None and form.stays
    found = form.matrix({name.removeprefix("m"): tensor for name, tensor in tensors.items()})
    assert found is not None
    return found


def unpacked(row: bytes, kind: str) -> list[float]:
    """A row of our own types, number by number: scale, zero, codes."""
    wide = kind.endswith("F")
    head, body = (4 if wide else 2) + 1, 32 if kind.startswith("Q8") else 16
    found = list[float]()
    for at in range(0, len(row), head + body):
        scale = torch.frombuffer(bytearray(row[at : at + head - 1]), dtype=torch.float32 if wide else torch.float16)
        zero, codes = row[at + head - 1], row[at + head : at + head + body]
        zero -= 256 if zero > 127 else 0
        if body == 32:
            numbers = [code - 256 if code > 127 else code for code in codes]
        else:
            numbers = [(code & 15) - 8 for code in codes] + [(code >> 4) - 8 for code in codes]
        found += [float(scale) * (number - zero) for number in numbers]
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_rows_hold_the_matrix_exactly(kind: str) -> None:
    matrix, expected = matrix_of(kind), TYPES[kind]
    assert type_of(matrix) == expected
    rows, wanted = rows_of(matrix, expected), matrix.dequantised()
    storage = next((each for each in STORAGE_TYPES.values() if each.name == expected), None)
    if storage is not None:
        assert torch.equal(dequantise(rows.numpy().reshape(-1), storage).view(wanted.shape), wanted)
    else:
        found = torch.tensor([unpacked(bytes(row.tolist()), expected) for row in rows])
        assert torch.equal(found, wanted)


def test_scales_that_do_not_fit_into_16_bits_widen_the_type() -> None:
    four = matrix_of("gptq-symmetric")
    scales = four.scales.float() * 1.00001
    assert type_of(Quantised(four.codes, scales, four.group_len, 4)) == "Q4_F"
    assert type_of(Quantised(four.codes, four.scales.float() * 1e-9, four.group_len, 4)) == "Q4_F"
    assert type_of(Quantised(four.codes, scales, four.group_len, 4, group_of=torch.arange(128) % 4)) is None
    assert type_of(Quantised(four.codes[:, :40], scales[:, :2], four.group_len, 4)) is None


class InOrder(Linear):
    """A matrix whose inputs are rounded in the order of its columns."""

    def __init__(self, weight: Tensor, bias: Tensor | None, order: Tensor) -> None:
        self._order, self._inner = order, RoundedInputs(weight[:, order], bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(x[..., self._order])

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


class Reference:
    """Linears of the native pass in PyTorch: inputs are rounded except at the head, whose weights are floats."""

    def __init__(self, orders: dict[int, Tensor]) -> None:
        self._orders = orders

    def __call__(self, weight: Tensor, bias: Tensor | None = None, **_: object) -> Linear:
        if len(weight) == VOCAB:
            return PlainLinear(weight, bias)
        size = weight.shape[1]
        return InOrder(weight, bias, self._orders.get(size, torch.arange(size)))


@pytest.mark.parametrize("kind", ["gptq", "gptq-symmetric", "gptq-8bit", "gptq-act-order", "int4-channel", "int8-channel"])
def test_a_model_is_the_reference(library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """With act-order, columns stand in the order of their groups, and inputs are rounded in that order."""
    path = folder_of(tmp_path, kind)
    groups = [each for name, each in load_file(tmp_path / "model.safetensors").items() if name.endswith("g_idx")]
    stored, exact = load_model(path, device="cpu"), load_model(path, dtype="float32", device="cpu", fast=False)
    monkeypatch.setattr(decoder, "linear_of", Reference({len(each): each.argsort(stable=True) for each in groups}))
    reference = load_model(path, dtype="float32", device="cpu", fast=False)
    assert isinstance(stored, NativeDecoder)
    assert_rounded_alike(stored, reference, exact, most=0.1)


@pytest.mark.parametrize("kind", ["gptq", "awq", "gptq-8bit", "int4-channel", "int8-channel"])
def test_float_inputs_have_the_bits_of_float32(library, tmp_path: Path, kind: str) -> None:
    """The plain product of dequantised weights is the reference, and not that with rounded inputs."""
    path = folder_of(tmp_path, kind)
    exact, stored, wide = (load_model(path, dtype=dtype, device="cpu") for dtype in ("stored-exact", "stored", "float32"))
    for count in (1, 3, 9):
        tree = TokenTree.chain(torch.arange(count)[None])
        found, rounded, wanted = (model.score(tree, model.new_cache(1)).logits for model in (exact, stored, wide))
        assert torch.equal(found, wanted) and not torch.equal(rounded, wanted), f"{count} nodes"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_embedding_and_head_keep_their_bits(library, tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    path = folder_of(tmp_path, "gptq", dtype, tied=tied)
    stored, plain = load_model(path, device="cpu"), load_model(path, dtype="float32", device="cpu", fast=False)
    assert isinstance(stored, NativeDecoder)
    tokens = torch.tensor([[0, 5, VOCAB - 1], [7, 7, 50]])
    wanted = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].float()[tokens]
    assert torch.equal(stored.embed(tokens), wanted)
    states = torch.randn(3, SHAPE["hidden_size"])
    torch.testing.assert_close(stored.logits(states), plain.logits(states), rtol=1e-4, atol=1e-4)  # pyright: ignore


@pytest.mark.parametrize("kind", ["gptq", "gptq-8bit", "gptq-act-order", "int4-group"])
def test_scores_do_not_depend_on_what_shares_the_pass(library, tmp_path: Path, kind: str) -> None:
    """Bit for bit: one node, several, a chain or a tree."""
    model = load_model(folder_of(tmp_path, kind, tied=True), dtype="stored", device="cpu")
    tokens, cache, alone = [(11 * i) % VOCAB for i in range(40)], model.new_cache(1), list[Tensor]()
    for token in tokens:
        alone.append(model.score(TokenTree.chain(torch.tensor([[token]])), cache).logits[0])
        cache.commit([[0]])
    for width in (2, 3, 5, 16, 33, 40):
        logits = model.score(TokenTree.chain(torch.tensor([tokens[:width]])), model.new_cache(1)).logits[0]
        assert torch.equal(logits, torch.cat(alone[:width])), f"{width} nodes"
    trees = [([*tokens[:3], 1, 2], [-1, 0, 1, 0, 3]), (tokens[:2], [-1, 0])]
    together = model.score(TokenTree.of_rows(trees), model.new_cache(2)).logits
    assert torch.equal(together[0, :3], torch.cat(alone[:3])) and torch.equal(together[1, :2], torch.cat(alone[:2]))


@pytest.mark.parametrize("kind", ["awq", "gptq-8bit", "gptq-act-order"])
@pytest.mark.parametrize("method", ["prompt-lookup", "draft-model"])
def test_speculative_text_is_plain_text(library, tmp_path: Path, method: str, kind: str) -> None:
    for name in ("target", "draft"):
        folder_of(tmp_path / name, kind)
        for file in Path(bundled_path("target")).glob("token*"):
            shutil.copyfile(file, tmp_path / name / file.name)
    draft = str(tmp_path / "draft") if method == "draft-model" else None
    llm = LLM(str(tmp_path / "target"), device="cpu", method=method, draft=draft)
    assert isinstance(llm.target, NativeDecoder)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)
        texts = [llm.generate([[1, 2, 3, 1, 2]], params, method=llm.compose(name))[0].token_ids for name in ("plain", method)]
        assert texts[0] == texts[1] and len(texts[0]) == 30


@pytest.mark.parametrize(("kind", "tied"), [("gptq", False), ("gptq-channel", True), ("int8-channel", True)])
def test_memory_is_that_of_the_file(library, tmp_path: Path, kind: str, tied: bool) -> None:
    """Packed matrices against what the file has for them; a tied head is there once."""
    model = load_model(folder_of(tmp_path, kind, tied=tied), device="cpu")
    assert isinstance(model, NativeDecoder)
    kept = [tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if "g_idx" not in name]
    ends = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2
    matrices = sum(tensor.nbytes for tensor in kept if tensor.dim() == 2) - (0 if tied else ends)
    assert model.num_bytes <= 1.3 * matrices


def test_where_it_is_dequantised_it_says_so(library, tmp_path: Path) -> None:
    for kind in ("fp8-channel", "nf4"):
        path = folder_of(tmp_path / kind, kind)
        with pytest.raises(OptionError, match=r"whose matrices .* are dequantised on a CPU"):
            load_model(path, dtype="stored", device="cpu")
        assert "dequantised" in describe_model(path).on_cpu
    for kind in ("gptq-act-order", "awq"):
        path = folder_of(tmp_path / kind, kind)
        assert describe_model(path).on_cpu.startswith("as stored, activations rounded to 8 bits")
    assert describe_model(path).dtype == "AWQ, 4 bits, groups of 32"
    on_gpu = {kind: describe_model(str(tmp_path / kind)).on_gpu for kind in ("awq", "fp8-channel", "nf4", "gptq-act-order")}
    assert {words.partition(" ")[0] for words in on_gpu.values()} == {"codes"}


def test_a_matrix_without_a_type_is_dequantised_beside_the_others(library, tmp_path: Path) -> None:
    """Groups of one matrix are not neighbours: it becomes floats, and with it those that it is joined with."""
    path = folder_of(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(
        UserWarning, match=r"3 of 14 quantised matrices \(GPTQ, 4 bits, groups of 32\) are multiplied in float32"
    ):
        stored = load_model(path, device="cpu")
    exact = load_model(path, dtype="float32", device="cpu")
    tree = TokenTree.chain(torch.tensor([[5, 6, 7]]))
    found, wanted = (model.score(tree, model.new_cache(1)).logits for model in (stored, exact))
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.1
