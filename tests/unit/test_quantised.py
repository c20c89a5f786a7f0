"""Quantised checkpoints are read as their libraries define them: numbers computed one by one, and the libraries themselves."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_checkpoint import in_mxfp4
from quantised_checkpoints import FORMS, Tensors, quantise_folder
from safetensors.torch import load_file, save_file
from test_decoder_families import FAMILIES, make_checkpoint

from outrider.core.errors import ModelError
from outrider.core.tree import TokenTree
from outrider.models.config import config_of, why_not_lean
from outrider.models.gguf.quants import STORAGE_TYPES, dequantise
from outrider.models.info import describe_model
from outrider.models.load import load_model
from outrider.models.native import BUILD, NativeDecoder
from outrider.models.quantised.formats import format_of
from outrider.models.quantised.mxfp4 import MXFP4
from outrider.models.quantised.stored import in_whole_numbers, rows_of, type_of
from outrider.models.weights import SafetensorsFolder

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "tie_word_embeddings": False}


def parts_of(kind: str, shape: tuple[int, int] = (24, 128)) -> tuple[dict[str, Any], Tensors, torch.Tensor]:
    """Settings of a form, the tensors of one matrix by their endings, and what they stand for."""
    settings, write = FORMS[kind]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(kind))) * 0.1 + 0.02
    tensors, numbers = write("m", weight)
    assert (numbers - weight).abs().max() < 0.15 * weight.abs().max(), "the writer rounds, and no more"
    return settings, {name.removeprefix("m"): tensor for name, tensor in tensors.items()}, numbers


@pytest.mark.parametrize("kind", FORMS)
def test_a_matrix_is_what_its_format_defines(kind: str) -> None:
    settings, parts, numbers = parts_of(kind)
    form = format_of({"quantization_config": settings})
    assert form is not None
    names = form.names
    assert names.marker in parts and set(parts) <= {names.marker, *names.others}
    found = form.dequantised(parts)
    assert found.dtype == torch.float32 and found.shape == numbers.shape
    assert (found - numbers).abs().max() <= 2e-7 * numbers.abs().max()
    matrix = form.matrix(parts)
    assert matrix is None or torch.equal(matrix.dequantised(), found)


def test_experts_of_gpt_oss() -> None:
    """Two numbers a byte, the lower half first, times a power of two."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=generator, dtype=torch.uint8)
    found = MXFP4().dequantised({"_blocks": blocks, "_scales": scales})
    assert found.shape == (2, 96, 6)

    def number(code: int) -> float:
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return -size if code & 8 else size

    for expert, i, o in ((0, 0, 0), (1, 33, 5), (0, 95, 3), (1, 62, 1), (1, 17, 2)):
        byte = int(blocks[expert, o, i // 32, i % 32 // 2])
        expected = math.ldexp(number(byte >> 4 if i % 2 else byte & 15), int(scales[expert, o, i // 32]) - 127)
        assert float(found[expert, i, o]) == expected
    assert torch.equal(found.bfloat16().float(), found)


def test_mxfp4_equals_transformers() -> None:
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=generator, dtype=torch.uint8)
    found = MXFP4().dequantised({"_blocks": blocks, "_scales": scales})
    assert torch.equal(found.bfloat16(), convert(blocks, scales, dtype=torch.bfloat16))


def library(name: str) -> None:
    """A library of the peers, from where OUTRIDER_PEERS says; the test is skipped without it."""
    folder = os.environ.get("OUTRIDER_PEERS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    pytest.importorskip(name, reason=f"pip install {name}, or OUTRIDER_PEERS=its folder", exc_type=ImportError)


@pytest.mark.parametrize("kind", [kind for kind, (settings, _) in FORMS.items() if "config_groups" in settings])
def test_compressed_tensors_decompresses_to_the_same(kind: str) -> None:
    library("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization import QuantizationScheme  # pyright: ignore[reportMissingImports]

    settings, parts, _ = parts_of(kind)
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    state = {name.removeprefix("."): tensor for name, tensor in parts.items()}
    state["weight_scale"] = state["weight_scale"].float()  # else it rounds each product to 16 bits
    theirs = BaseCompressor.get_value_from_registry(settings["format"]).decompress(state, scheme)["weight"]
    form = format_of({"quantization_config": settings})
    assert form is not None
    torch.testing.assert_close(form.dequantised(parts), theirs.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", FORMS)
def test_a_model_is_its_dequantised_twin(tmp_path: Path, kind: str) -> None:
    """A folder that says ``quantization_config`` gives the scores of one that holds the same numbers as floats."""
    make_checkpoint(tmp_path / "twin", "llama", SHAPE)
    make_checkpoint(tmp_path / "quantised", "llama", SHAPE)
    meant = quantise_folder(tmp_path / "quantised", kind)
    save_file(meant, tmp_path / "twin" / "model.safetensors", metadata={"format": "pt"})
    tree = TokenTree.chain(torch.tensor([[3, 1, 4, 1, 5]]))
    found, twin = (load_model(str(tmp_path / name), dtype="float32", device="cpu") for name in ("quantised", "twin"))
    scores, wanted = (model.score(tree, model.new_cache(1)).logits for model in (found, twin))
    assert (scores - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    info = describe_model(str(tmp_path / "quantised"))
    assert info.runs_on == "lean decoder"
    assert info.num_parameters == SafetensorsFolder(tmp_path / "twin").num_parameters


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_codes_of_experts_stay_on_a_cpu(tmp_path: Path, kind: str) -> None:
    """All experts are chosen, so rounded inputs move no choice."""
    if BUILD.wait() is None:
        pytest.skip("no C++ compiler")
    sizes = {**SHAPE, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 16}
    make_checkpoint(tmp_path, "qwen3_moe", sizes)
    quantise_folder(tmp_path, kind)
    stored, wide = (load_model(str(tmp_path), dtype=dtype, device="cpu") for dtype in ("stored", "float32"))
    assert isinstance(stored, NativeDecoder) and isinstance(wide, NativeDecoder)
    assert stored.num_bytes < 0.4 * wide.num_bytes
    tree = TokenTree.chain(torch.tensor([[3, 1, 4, 1, 5]]))
    found, meant = (model.score(tree, model.new_cache(1)).logits for model in (stored, wide))
    assert 0 < (found - meant).norm() / meant.norm() < 0.05


@pytest.mark.parametrize(("middle", "kind"), [(120, "Q5_0"), (60, "Q8_F")])
def test_mxfp4_is_whole_numbers_with_a_scale(middle: int, kind: str) -> None:
    """Exactly, in five bits where the powers of two fit into 16, in eight otherwise."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(middle - 4, middle + 4, (2, 6, 3), generator=generator, dtype=torch.uint8)
    matrix = MXFP4().matrix({"_blocks": blocks, "_scales": scales})
    whole = in_whole_numbers(matrix)
    assert type_of(whole) == kind and torch.equal(whole.dequantised(), matrix.dequantised())
    if kind == "Q5_0":
        storage = next(storage for storage in STORAGE_TYPES.values() if storage.name == kind)
        rows = rows_of(whole, kind).numpy().reshape(-1)
        assert torch.equal(dequantise(rows, storage).view(matrix.shape), matrix.dequantised())


def test_experts_in_mxfp4_stay_on_a_cpu(tmp_path: Path) -> None:
    if BUILD.wait() is None:
        pytest.skip("no C++ compiler")
    model_type, changes = FAMILIES["gpt-oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 4}
    make_checkpoint(tmp_path, model_type, {**changes, **sizes})
    in_mxfp4(tmp_path)
    stored, wide = (load_model(str(tmp_path), dtype=dtype, device="cpu") for dtype in ("stored", "float32"))
    assert isinstance(stored, NativeDecoder) and isinstance(wide, NativeDecoder)
    assert stored.num_bytes < 0.5 * wide.num_bytes, "attention and head are not quantised"
    tree = TokenTree.chain(torch.tensor([[3, 1, 4, 1, 5]]))
    found, meant = (model.score(tree, model.new_cache(1)).logits for model in (stored, wide))
    assert 0 < (found - meant).norm() / meant.norm() < 0.05


def test_a_mixture_of_experts_in_mxfp4(tmp_path: Path) -> None:
    model_type, changes = FAMILIES["gpt-oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
    for name in ("twin", "quantised"):
        make_checkpoint(tmp_path / name, model_type, {**changes, **sizes})
    save_file(in_mxfp4(tmp_path / "quantised"), tmp_path / "twin" / "model.safetensors", metadata={"format": "pt"})
    tree = TokenTree.chain(torch.tensor([[3, 1, 4, 1, 5]]))
    found, twin = (load_model(str(tmp_path / name), dtype="float32", device="cpu") for name in ("quantised", "twin"))
    scores, wanted = (model.score(tree, model.new_cache(1)).logits for model in (found, twin))
    assert torch.equal(scores, wanted)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quant_method": "gptqq"}, "quantised as 'gptqq', which is not supported; did you mean 'gptq'"),
        ({"quant_method": "hqq"}, "'hqq', which is not supported; .*valid: awq, bitsandbytes"),
        ({"quant_method": "awq", "version": "gemv"}, "layout 'gemv' is not supported, only 'gemm'"),
        ({"quant_method": "awq", "bits": 3}, "3 bits is not supported, only 4"),
        ({"quant_method": "gptq", "bits": "four"}, "cannot be read"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "no scheme of weights"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantised",
                "config_groups": {"a": {"weights": {"num_bits": 4}}},
            },
            "'pack-quantised' is not supported; did you mean 'pack-quantized'",
        ),
    ],
)
def test_what_is_not_read_is_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        format_of({"quantization_config": settings})


def test_three_bits_are_refused() -> None:
    settings, parts, _ = parts_of("gptq")
    form = format_of({"quantization_config": {**settings, "bits": 3}})
    assert form is not None
    with pytest.raises(ModelError, match="codes of 3 bits are not supported"):
        form.matrix(parts)


def test_an_unknown_method_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", SHAPE)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptqmodel"}}
    assert config_of(raw) is None and "'gptqmodel'" in str(why_not_lean(raw))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"quantised as 'gptqmodel'.*did you mean 'gptq'"):
        load_model(str(tmp_path), device="cpu")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", SHAPE)
    quantise_folder(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    for change, match in (
        ({f"{name}.scales": torch.ones(7, 64)}, "down_proj.weight' do not fit together as GPTQ, 4 bits, groups of 32"),
        ({f"{name}.qzeros": None}, "down_proj.weight' do not fit together"),
        ({f"{name}.qweight": torch.zeros(4, 64, dtype=torch.int32)}, r"down_proj.weight'.* (shape|fit)"),
    ):
        kept = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=match):
            load_model(str(tmp_path), dtype="float32", device="cpu")
