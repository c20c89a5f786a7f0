"""GGUF: storage types against the format's definition and the ``gguf`` package, files against our own small writer,
models against Hugging Face's, tokenizers against the algorithms they stand for. Damaged files give ``ModelError``."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.gguf import chat_template, gguf_tokenizer, hf_config, hf_tensors, quants, special_tokens
from outrider.models.gguf.quants import STORAGE_TYPES, dequantise
from outrider.models.gguf.reader import read_gguf

CODES = {storage.name: code for code, storage in STORAGE_TYPES.items()}
QUANTISED = [storage for storage in STORAGE_TYPES.values() if storage.block_len > 1]


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> tuple[int, bytes]:
    """The type code and the bytes of a metadata value."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 1 << 32 else (11, struct.pack("<q", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    items = [_typed(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0] if items else 4, len(items)) + b"".join(raw for _, raw in items)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Any], *, version: int = 3) -> Path:
    """Write a GGUF file; a tensor is stored as F32 unless given as (type code, shape, raw bytes)."""
    alignment = metadata.get("general.alignment", 32)
    head, data = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)), b""
    for key, value in metadata.items():
        code, raw = _typed(value)
        head += _string(key) + struct.pack("<I", code) + raw
    for name, tensor in tensors.items():
        packed = (0, tuple(tensor.shape), tensor.numpy().tobytes()) if isinstance(tensor, Tensor) else tensor
        code, shape, raw = packed
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", code, len(data))
        data += raw + b"\0" * (-len(raw) % alignment)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


# --- storage types, block by block ----------------------------------------------------------------------------------

NIBBLES = bytes(i | (15 - i) << 4 for i in range(16))
"""Sixteen bytes whose low halves count up and whose high halves count down."""
UP, DOWN = list(range(16)), list(range(15, -1, -1))
BIT4 = 0b1010_0000_1111_0000_0000_1111_0101_0101


def _half(value: float) -> bytes:
    return struct.pack("<e", value)


def _legacy_block(name: str) -> tuple[bytes, list[float]]:
    q4, q5 = UP + DOWN, [q + 16 * (BIT4 >> i & 1) for i, q in enumerate(UP + DOWN)]
    table = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    bits, small = struct.pack("<I", BIT4), [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    return {
        "MXFP4": (bytes([125]) + NIBBLES, [0.25 * (small[q] if q < 8 else -small[q - 8]) for q in q4]),
        "Q4_0": (_half(0.5) + NIBBLES, [0.5 * (q - 8) for q in q4]),
        "Q4_1": (_half(0.5) + _half(-3.0) + NIBBLES, [0.5 * q - 3 for q in q4]),
        "Q5_0": (_half(0.25) + bits + NIBBLES, [0.25 * (q - 16) for q in q5]),
        "Q5_1": (_half(0.25) + _half(2.0) + bits + NIBBLES, [0.25 * q + 2 for q in q5]),
        "Q8_0": (_half(2.0) + bytes(range(112, 144)), [2.0 * (b - 256 * (b > 127)) for b in range(112, 144)]),
        "IQ4_NL": (_half(0.5) + NIBBLES, [0.5 * table[q] for q in q4]),
    }[name]


def _scales_of_k4() -> tuple[bytes, list[int], list[int]]:
    """Eight 6-bit scales and offsets, and the twelve bytes that hold them."""
    scales, offsets = [5 * g + 3 for g in range(8)], [60 - 7 * g for g in range(8)]
    packed = bytearray(12)
    for g in range(4):
        packed[g] = scales[g] | (scales[g + 4] >> 4) << 6
        packed[g + 4] = offsets[g] | (offsets[g + 4] >> 4) << 6
        packed[g + 8] = (scales[g + 4] & 15) | (offsets[g + 4] & 15) << 4
    return bytes(packed), scales, offsets


def _k_block(name: str) -> tuple[bytes, list[float]]:
    """A block of 256 and, weight by weight, what it means: group of 16 or 32, two halves of 128, quarters of 32."""
    places = [(i, i // 128, i % 128 // 32, i % 32) for i in range(256)]
    packed, scales, offsets = _scales_of_k4()
    ramp, pairs = NIBBLES * 8, bytes([0b11100100]) * 64  # pairs of bits that count 0, 1, 2, 3
    if name == "Q2_K":
        raw = bytes(g | (15 - g) << 4 for g in range(16)) + pairs + _half(1.0) + _half(0.5)
        return raw, [(i // 16) * quarter - 0.5 * (15 - i // 16) for i, _, quarter, _ in places]
    if name == "Q3_K":
        high, values = 0b10100110, [24 + g for g in range(16)]
        low_bits = bytes((values[g] & 15) | (values[g + 8] & 15) << 4 for g in range(8))
        high_bits = bytes(sum((values[4 * k + g] >> 4) << 2 * k for k in range(4)) for g in range(4))
        raw = bytes([high]) * 32 + pairs + low_bits + high_bits + _half(0.5)
        q = [quarter + 4 * (high >> (4 * half + quarter) & 1) - 4 for _, half, quarter, _ in places]
        return raw, [0.5 * (values[i // 16] - 32) * q[i] for i in range(256)]
    four_bits = [(DOWN if i // 32 % 2 else UP)[i % 16] for i in range(256)]
    if name == "Q4_K":
        raw = _half(0.5) + _half(2.0) + packed + ramp
        return raw, [0.5 * scales[i // 32] * four_bits[i] - 2 * offsets[i // 32] for i in range(256)]
    if name == "Q5_K":
        raw = _half(0.5) + _half(2.0) + packed + bytes([0b10010110]) * 32 + ramp
        q = [four_bits[i] + 16 * (0b10010110 >> i // 32 & 1) for i in range(256)]
        return raw, [0.5 * scales[i // 32] * q[i] - 2 * offsets[i // 32] for i in range(256)]
    if name == "Q6_K":
        raw = ramp + pairs + struct.pack("<16b", *range(-8, 8)) + _half(0.25)
        q = [(DOWN if quarter > 1 else UP)[place % 16] + 16 * quarter - 32 for _, _, quarter, place in places]
        return raw, [0.25 * (i // 16 - 8) * q[i] for i in range(256)]
    if name == "Q8_K":
        values = list(range(-128, 128))
        return struct.pack("<f256b16h", 0.125, *values, *range(16)), [0.125 * value for value in values]
    assert name == "IQ4_XS"
    low = bytes((scales[g] & 15) | (scales[g + 1] & 15) << 4 for g in range(0, 8, 2))
    high = struct.pack("<H", sum((scales[g] >> 4) << 2 * g for g in range(8)))
    halved = _legacy_block("IQ4_NL")[1]  # a block of 32 with scale 0.5
    return _half(1.0) + high + low + ramp, [(scales[i // 32] - 32) * 2 * halved[i % 32] for i in range(256)]


@pytest.mark.parametrize("storage", QUANTISED, ids=lambda storage: storage.name)
def test_hand_made_block(storage: quants.StorageType) -> None:
    raw, expected = _legacy_block(storage.name) if storage.block_len == 32 else _k_block(storage.name)
    assert len(raw) == storage.block_bytes
    got = dequantise(np.frombuffer(raw * 3, dtype=np.uint8).copy(), storage)
    assert got.tolist() == expected * 3


@pytest.mark.parametrize("name", [*(storage.name for storage in QUANTISED if storage.name != "Q8_K"), "F16", "BF16"])
def test_random_blocks_match_the_gguf_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, storage = pytest.importorskip("gguf"), STORAGE_TYPES[CODES[name]]  # the package cannot unpack Q8_K
    monkeypatch.setattr(quants, "CHUNK_LEN", 512)  # several chunks, hence threads
    raw = np.random.default_rng(7).integers(0, 256, (37, storage.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random bytes make infinite and undefined scales too
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantise(raw.reshape(-1), storage).view(expected.shape).numpy(), expected)


# --- files ----------------------------------------------------------------------------------------------------------

METADATA = {
    **{"general.architecture": "llama", "flag": True, "negative": -5, "pi": 3.5, "text": "naïve ✓"},
    **{"numbers": [1, 2, 3], "nested": [["a"], ["b", "c"]], "empty": []},
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 1])
def test_round_trip(tmp_path: Path, version: int, alignment: int) -> None:
    raw, block = _k_block("Q4_K")
    tensors = {"matrix": torch.arange(6.0).view(2, 3), "row": torch.tensor([1.5]), "cube": torch.randn(2, 3, 4)}
    metadata = METADATA | {"general.alignment": alignment}
    packed = {"packed": (CODES["Q4_K"], (3, 256), raw * 3)}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", metadata, packed | tensors, version=version))
    assert file.metadata == metadata
    assert list(file.tensors) == list(packed | tensors)
    assert all(torch.equal(file.tensor(name), tensor) for name, tensor in tensors.items())
    assert file.tensor("packed").tolist() == [block] * 3
    assert file.tensor("matrix", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_tensors_own_their_memory_and_keep_integers(tmp_path: Path) -> None:
    big = torch.tensor([1 << 40, -3])
    tensors = {"w": torch.ones(4), "ids": (CODES["I64"], (2,), big.numpy().tobytes())}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", METADATA, tensors))
    file.tensor("w").zero_()
    assert file.tensor("w").tolist() == [1.0] * 4
    assert file.tensor("ids", dtype=torch.int64).tolist() == big.tolist()


def test_file_of_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    weights = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_array("list", [0.5, 1.5])
    writer.add_uint64("big", 1 << 60)
    writer.add_tensor("w", gguf.quantize(weights, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = read_gguf(tmp_path / "x.gguf")
    assert file.metadata == {"general.architecture": "llama", "list": [0.5, 1.5], "big": 1 << 60}
    torch.testing.assert_close(file.tensor("w"), torch.from_numpy(weights), atol=0.02, rtol=0)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "not gguf": (lambda raw: b"PK\x03\x04" + raw[4:], "not a GGUF file"),
    "empty": (lambda raw: b"", "empty"),
    "tiny": (lambda raw: b"GG", "not a GGUF file"),
    "version 1": (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1 is not supported"),
    "big endian": (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"),
    "header only": (lambda raw: raw[:30], "truncated"),
    "data missing": (lambda raw: raw[:-8], "truncated"),
    "many tensors": (lambda raw: raw[:8] + struct.pack("<Q", 1 << 62) + raw[16:], "damaged"),
    "unknown type": (lambda raw: raw.replace(b"flag\x07", b"flag\x4d"), "type 77"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = write_gguf(tmp_path / "x.gguf", METADATA, {"w": torch.ones(64)})
    change, message = DAMAGES[damage]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_unreadable_paths_names_and_storage_types(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for unreadable in (path, tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            read_gguf(unreadable)
    with pytest.raises(ModelError, match="did you mean 'weights'"):
        read_gguf(write_gguf(path, METADATA, {"weights": torch.ones(1)})).tensor("weihgts")
    with pytest.raises(ModelError, match=r"'w' is stored as IQ2_XXS.*F32.*Q4_K"):
        read_gguf(write_gguf(path, {}, {"w": (16, (256,), b"\0" * 66)}))
    with pytest.raises(ModelError, match="not a multiple"):
        read_gguf(write_gguf(path, {}, {"w": (CODES["Q4_0"], (33,), b"\0" * 64)}))


def test_any_damage_gives_a_model_error_or_a_file(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "x.gguf", METADATA, {"w": torch.ones(8)}).read_bytes()
    pick, path = random.Random(0), tmp_path / "y.gguf"
    damaged = [whole[:end] for end in range(0, len(whole), 3)]
    for place in pick.choices(range(len(whole)), k=400):
        damaged.append(whole[:place] + bytes([pick.randrange(256)]) + whole[place + 1 :])
    for raw in damaged:
        path.write_bytes(raw)
        with contextlib.suppress(ModelError):
            file = read_gguf(path)
            _ = [file.tensor(name) for name in file.tensors]


# --- models ---------------------------------------------------------------------------------------------------------

SMALL = {
    **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
}
WINDOWED = {"head_dim": 16, "sliding_window": 8}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
PHI3_LONG = {"rope_scaling": LONG, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_theta": 500000.0}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "head_dim": 32}),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("mistral", WINDOWED),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi3": ("phi3", {}),
    "phi3, long": ("phi3", PHI3_LONG | {"sliding_window": 8}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", WINDOWED | {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", WINDOWED | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""Where llama.cpp's name is not Hugging Face's."""


def _hf_model(model_type: str, config: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoConfig.for_model(**config | {"model_type": model_type})
    return transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval()


def _as_converter_writes(model: Any) -> dict[str, Tensor]:
    """The state dict with llama.cpp's names (as its own package gives them), rotary order, and norms."""
    gguf, config = pytest.importorskip("gguf"), model.config
    arch = ARCHITECTURES.get(config.model_type) or str(config.model_type)
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, Tensor] = {}
    for name, original in model.state_dict().items():
        part, tensor = name.split(".")[-2], original
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and part in heads:
            rows = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:])
            tensor = rows.swapaxes(1, 2).reshape(tensor.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor.contiguous()
    return tensors


KEYS = {
    **{"context_length": "max_position_embeddings", "embedding_length": "hidden_size", "rope.freq_base": "rope_theta"},
    **{"block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size"},
    **{"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"},
    **{"attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.key_length": "head_dim"},
    **{"attention.sliding_window": "sliding_window"},
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}


def _model_metadata(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    arch = ARCHITECTURES.get(model_type, model_type)
    values = {key: config[name] for key, name in KEYS.items() if name in config}
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        values["rope.scaling.original_context_length"] = scaling.get("original_max_position_embeddings", 64)
    values |= {"rope.dimension_count": 6} if "partial_rotary_factor" in config else {}
    values |= {"rope.freq_base": 1e6} if arch == "gemma3" else {}
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def _rope_tensors(model: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        head_dim = config["head_dim"]
        plain = config["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        return {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq}
    if scaling.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": torch.tensor(scaling[f"{kind}_factor"]) for kind in ("short", "long")}
    return {}


@pytest.mark.parametrize("case", MODELS)
def test_model_comes_back(tmp_path: Path, case: str) -> None:
    model_type, options = MODELS[case]
    config = SMALL | options
    torch.manual_seed(0)
    model = _hf_model(model_type, config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tensors = _as_converter_writes(model) | _rope_tensors(model, config)
    file = read_gguf(write_gguf(tmp_path / "m.gguf", _model_metadata(model_type, config), tensors))

    read, state = hf_config(file), dict(hf_tensors(file))
    assert read["model_type"] == model_type and read["rms_norm_eps"] == 1e-5
    assert read["architectures"] == [type(model).__name__]
    assert (read["rope_scaling"] or {}).get("rope_type") == config.get("rope_scaling", {}).get("rope_type")
    exact = 1e-6 if model_type.startswith("gemma") else 0.0  # 1 + w - 1 rounds
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=exact, rtol=0)
    again = _hf_model(model_type, read)
    missing, unexpected = again.load_state_dict(state, strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if read["tie_word_embeddings"] else [])
    again.tie_weights()
    ids = torch.arange(40)[None] * 7 % 60
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("factors", [[1.0, 1.0, 3.0, 8.0], [1.25, 2.0, 1.5, 9.0]])
def test_any_rope_factors_reach_the_frequencies(tmp_path: Path, factors: list[float]) -> None:
    metadata = _model_metadata("llama", SMALL | {"rope_theta": 10000.0})
    tensors = _as_converter_writes(_hf_model("llama", SMALL)) | {"rope_freqs.weight": torch.tensor(factors)}
    config = hf_config(read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors)))
    assert config["rope_freq_factors"] == factors
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(_hf_model("llama", config).model.rotary_emb.inv_freq, plain / torch.tensor(factors))


def test_models_we_cannot_load_are_named(tmp_path: Path) -> None:
    metadata = _model_metadata("llama", SMALL)
    tensors = _as_converter_writes(_hf_model("llama", SMALL))
    refused = {
        "'lama' is not supported.*did you mean 'llama'": ({"general.architecture": "lama"}, {}),
        "one part of several": ({"split.count": 2}, {}),
        "differs between layers": ({"llama.attention.head_count": [4, 2]}, {}),
        "is 0, not a positive": ({"llama.attention.head_count": 0}, {}),
        "'blk.0.ffn_gate_inp.weight' is unknown": ({}, {"blk.0.ffn_gate_inp.weight": torch.ones(2)}),
    }
    for message, (more_metadata, more_tensors) in refused.items():
        file = read_gguf(write_gguf(tmp_path / "m.gguf", metadata | more_metadata, tensors | more_tensors))
        with pytest.raises(ModelError, match=message):
            hf_config(file)
            dict(hf_tensors(file))


# --- tokenizers -----------------------------------------------------------------------------------------------------

TEXTS = ["", " two  spaces\n\tthen 12345, don't", "naïve 東京 😀", "<|im_start|>hello<|im_end|>", "\u2581x"]


def _byte_level(**more: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 256 bytes, a few merges, two control tokens and a user-defined one."""
    pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "4 5"]
    plain = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    tokens = ["<|im_start|>", "<|im_end|>", "<tool>", *plain]
    prefix = "tokenizer.ggml."
    keys = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    keys |= {"token_type": [3, 3, 4] + [1] * len(plain)} | more
    return {"tokenizer.chat_template": "{{ messages }}"} | {prefix + key: value for key, value in keys.items()}


def _tokenizer(tmp_path: Path, metadata: dict[str, Any]) -> Any:
    return gguf_tokenizer(read_gguf(write_gguf(tmp_path / "t.gguf", metadata, {})))


def test_byte_level_round_trip_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, _byte_level())
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>hello<tool> hello").tokens == ["<|im_start|>", "hello", "<tool>", "Ġhello"]
    file = read_gguf(tmp_path / "t.gguf")
    assert special_tokens(file) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert chat_template(file) == "{{ messages }}"


def test_pre_tokenizers_cut_numbers_as_the_models_do(tmp_path: Path) -> None:
    cuts = {"smollm": "1 2 3 4 5", "gpt-2": "123 45", "llama-bpe": "123 45", "qwen2": "1 2 3 4 5", "gpt-4o": "123 45"}
    for name, expected in cuts.items():
        tokenizer = _tokenizer(tmp_path, _byte_level(pre=name))
        assert tokenizer.encode("12345", add_special_tokens=False).tokens == expected.split(), name
    assert _tokenizer(tmp_path, _byte_level(pre="llama-bpe")).encode("hello").tokens == ["<|im_start|>", "hello"]
    with pytest.warns(UserWarning, match="unknown pre-tokenizer 'new'"):
        assert _tokenizer(tmp_path, _byte_level(pre="new")).encode("12345").tokens == ["123", "45"]


def _sentencepiece(**more: Any) -> dict[str, Any]:
    words = [*"▁abcdehlo12", "he", "ll", "▁he", "llo", "lo", "▁hello", "hello", "ab", "bc", "abc", "▁a", "▁▁", "cab"]
    tokens = ["<unk>", "<s>", "</s>", "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(words))]
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    keys |= {"token_type": [2, 3, 3, 4] + [6] * 256 + [1] * len(words), "unknown_token_id": 0} | more
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _best_pair_first(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's BPE as defined: join the best-scoring neighbours while any join; strange characters are bytes."""
    keys = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    score = {token: score for token, score, kind in zip(*keys, strict=True) if kind == 1}
    pieces = list(text)
    while joined := {i: score[a + b] for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in score}:
        best = max(joined, key=lambda i: joined[i])
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return [t for p in pieces for t in ([p] if p in score else [f"<0x{byte:02X}>" for byte in p.encode()])]


def test_sentencepiece_joins_best_scores_first(tmp_path: Path) -> None:
    metadata = _sentencepiece()
    tokenizer, pick = _tokenizer(tmp_path, metadata), random.Random(1)
    for _ in range(300):
        text = "".join(pick.choices("abchelo é", k=pick.randrange(1, 14)))
        text = " ".join(text.split())  # runs of spaces are user-defined tokens here
        encoding = tokenizer.encode(text)
        assert encoding.tokens == ["<s>", *_best_pair_first("▁" + text.replace(" ", "▁"), metadata)], text
        assert tokenizer.decode(encoding.ids) == text
    assert tokenizer.encode("</s>a  b").tokens == ["<s>", "</s>", "▁a", "  ", "▁", "b"]


def test_every_end_of_an_answer_is_listed(tmp_path: Path) -> None:
    model = _hf_model("llama", SMALL)
    metadata = _model_metadata("llama", SMALL) | _byte_level(eos_token_id=5, eot_token_id=7)
    file = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, _as_converter_writes(model)))
    assert hf_config(file)["eos_token_id"] == [5, 7, 1]  # 1 is <|im_end|>, which nothing names


def test_unusable_vocabularies_are_refused(tmp_path: Path) -> None:
    refused = {
        "'bert' is not supported": _byte_level(model="bert"),
        "no tokenizer.ggml.merges": {key: value for key, value in _byte_level().items() if "merges" not in key},
        "the vocabulary cannot be used": _byte_level(merges=["zz top"]),
        "token types": _byte_level(token_type=[1, 1]),
        "one score per token": _sentencepiece(scores=[0.0]),
    }
    for message, metadata in refused.items():
        with pytest.raises(ModelError, match=message):
            _tokenizer(tmp_path, metadata)


def test_some_strings_are_read_without_the_others(tmp_path: Path) -> None:
    tokens = ["", "a", "Ü" * 9, "b" * 300, "c"]
    metadata = read_gguf(write_gguf(tmp_path / "m.gguf", {"words": tokens, "numbers": [1, 2], "word": "w"}, {})).metadata
    assert metadata.some_strings("words", [3, 0, 2, 3]) == {0: "", 2: tokens[2], 3: tokens[3]}
    assert metadata.some_strings("words", []) == metadata.some_strings("numbers", [0]) == {}
    assert [metadata.num_items(key) for key in ("words", "numbers", "word", "none")] == [5, 2, 0, 0]
    assert metadata["words"] == tokens
