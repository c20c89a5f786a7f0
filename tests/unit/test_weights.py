"""Reading checkpoints: every layout that is supported, and a one-line reason for every one that is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.errors import ModelError, OptionError
from outrider.core.tree import TokenTree
from outrider.models import linear
from outrider.models.config import config_of
from outrider.models.decoder import Decoder
from outrider.models.dtypes import auto_dtype
from outrider.models.linear import Linear, PackedLinear, PlainLinear, TwofoldLinear, can_pack, linear_of
from outrider.models.load import device_of, load_model
from outrider.models.weights import SafetensorsFolder, TensorDict, read_weights

CPU = torch.device("cpu")
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6]]


def make_llama(folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 32, **changes}))
    model.to(dtype).eval().save_pretrained(folder, max_shard_size=shard)
    return model


def logits_of(model: Any) -> Tensor:
    return model.score(TokenTree.chain(torch.tensor(TOKENS)), model.new_cache(1)).logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama(tmp_path)
    return tmp_path


def fails(folder: Path | str, *words: str, **options: Any) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), device="cpu", **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    make_llama(tmp_path / "one")
    make_llama(tmp_path / "many", shard="4KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load_model(str(tmp_path / name), device="cpu") for name in ("one", "many"))
    assert torch.equal(logits_of(one), logits_of(many))


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    theirs = make_llama(tmp_path, tie_word_embeddings=True)
    source = SafetensorsFolder(tmp_path)
    assert "lm_head.weight" not in source.names
    config = config_of(json.loads((tmp_path / "config.json").read_text()))
    assert config is not None and config.tied_head
    weights = read_weights(source, config, dtype=torch.float32, device=CPU)
    assert weights.head is weights.embedding
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits
    torch.testing.assert_close(logits_of(Decoder(config, weights)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_other_stored_types(tmp_path: Path, stored: torch.dtype) -> None:
    theirs = make_llama(tmp_path, dtype=stored)
    ours = load_model(str(tmp_path), dtype="float32", device="cpu")
    with torch.no_grad():
        expected = theirs.float()(torch.tensor(TOKENS)).logits
    torch.testing.assert_close(logits_of(ours), expected, atol=1e-5, rtol=0)


def test_bfloat16_passes_stay_near_float32(folder: Path) -> None:
    exact, rounded = (logits_of(load_model(str(folder), dtype=dtype, device="cpu")) for dtype in ("float32", "bfloat16"))
    assert 0 < float((exact - rounded.float()).abs().max()) < 0.05 * float(exact.std())


def test_a_bare_model_without_a_prefix(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    expected = logits_of(load_model(str(folder), device="cpu"))
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(load_model(str(folder), device="cpu")), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_every_layout_of_a_matrix_multiplies_alike(dtype: torch.dtype, num_rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x, residual = (torch.randn(*shape, generator=generator) for shape in ((24, 32), (num_rows, 32), (num_rows, 24)))
    added = torch.randn(24, generator=generator).to(dtype) if bias else None
    weight, x, residual = weight.to(dtype), x.to(dtype), residual.to(dtype)
    product = x.double() @ weight.double().t() + (0 if added is None else added.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    layouts: list[Linear] = [PlainLinear(weight, added), linear_of(weight, added), linear_of(weight, added, twofold=True)]
    if can_pack(dtype):
        layouts += [PackedLinear(weight, added), TwofoldLinear(layouts[0], PackedLinear(weight, added), 32)]
    for layout in layouts:
        torch.testing.assert_close(layout(x).double(), product, atol=tolerance, rtol=tolerance)
        summed = layout.add_to(residual, x).double()
        torch.testing.assert_close(summed, residual.double() + product, atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("refusal", ["mkldnn", "reorder"])
def test_where_packing_fails_the_plain_layout_serves(monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    """As on machines without AVX-512, where PyTorch raises when it is asked to pack bfloat16."""

    def refuse(*_: object) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx512bw, avx512vl and avx512dq")

    monkeypatch.setattr(linear, "can_pack", can_pack.__wrapped__)
    if refusal == "mkldnn":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(linear.PackedLinear, "__init__", refuse)
    assert isinstance(linear_of(torch.randn(24, 32).bfloat16()), PlainLinear)
    assert isinstance(linear_of(torch.randn(1024, 1024), twofold=True), PlainLinear)


def test_missing_folder(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "no such folder", "hub name")
    fails("./nowhere", "no such folder")
    fails("nowhere", "no such folder")
    fails(tmp_path / "nothing.gguf", "no such file")


def test_not_a_model_folder(tmp_path: Path) -> None:
    fails(tmp_path, "no config.json", "not a model folder")
    (tmp_path / "weights.txt").write_text("x")
    fails(tmp_path / "weights.txt", "is a file, but not a .gguf one")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    fails(folder, "config.json", "not a JSON object")


def test_config_without_a_size(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "hidden_size": None}))
    fails(folder, "hidden_size = None", "positive whole number")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "not 2 layers long"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope needs 2 factors"),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear rope scaling without a factor"),
        ({"rope_parameters": "linear"}, "cannot be read"),
        ({"vocab_size": -1}, "vocab_size = -1"),
    ],
)
def test_config_that_contradicts_itself(folder: Path, changes: dict[str, Any], words: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    fails(folder, words)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(folder, "no model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"")
    fails(folder, "only pytorch_model.bin", "save_pretrained")


def test_truncated_and_corrupt_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:4], b"", b"\xff" * 100):
        path.write_bytes(damaged)
        fails(folder, "model.safetensors is damaged or cut short", "fetch the file again")


def test_missing_shard_and_broken_index(tmp_path: Path) -> None:
    make_llama(tmp_path, shard="4KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    fails(tmp_path, shard.name, "is missing though")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        fails(tmp_path, "is not a weight index")


def changed(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors if tensor is None else {**tensors, name: tensor}, folder / "model.safetensors")


def test_missing_tensor(folder: Path) -> None:
    changed(folder, "model.layers.1.mlp.up_proj.weight", None)
    fails(folder, "'model.layers.1.mlp.up_proj.weight' is missing", "incomplete")


def test_missing_embedding(folder: Path) -> None:
    changed(folder, "model.embed_tokens.weight", None)
    fails(folder, "'model.embed_tokens.weight' is missing")


def test_missing_head(folder: Path) -> None:
    changed(folder, "lm_head.weight", None)
    fails(folder, "'lm_head.weight' is missing")


def test_wrong_shape(folder: Path) -> None:
    changed(folder, "model.layers.0.self_attn.k_proj.weight", torch.zeros(4, 16))
    fails(folder, "'model.layers.0.self_attn.k_proj.weight' has shape [4, 16]", "asks for [8, 16]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_unsupported_stored_type(folder: Path, dtype: torch.dtype) -> None:
    changed(folder, "model.norm.weight", torch.zeros(16).to(dtype))
    fails(folder, f"is stored as {str(dtype).removeprefix('torch.')}", "unquantised")


def test_unknown_dtype_and_device(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"unknown dtype 'float23'; did you mean 'float32'\? valid: auto, bfloat16"):
        load_model(str(folder), dtype="float23")
    with pytest.raises(OptionError, match=r"unknown device 'cudda'; did you mean 'cuda'\?"):
        load_model(str(folder), device="cudda")
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="device 'cuda' is not available"):
            load_model(str(folder), device="cuda")
    assert device_of("cpu") == CPU


def test_the_hub_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    fails("somebody/some-model", "somebody/some-model", "the hub did not answer (no connection)", "local folder")


def test_auto_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.dtypes.auto_types", lambda: {torch.float32, torch.bfloat16})
    assert auto_dtype("bfloat16", CPU) == torch.bfloat16
    assert auto_dtype("float16", CPU) == auto_dtype(None, CPU) == torch.float32
    assert auto_dtype("float16", torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr("outrider.models.dtypes.auto_types", lambda: {torch.float32})
    assert auto_dtype("bfloat16", CPU) == torch.float32


def test_without_the_native_pass_auto_asks_for_bfloat16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for has_it, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has_it=has_it: has_it)
        assert auto_dtype("bfloat16", CPU) == expected


def test_every_tensor_is_forgotten_once_read(folder: Path) -> None:
    config = config_of(json.loads((folder / "config.json").read_text()))
    assert config is not None
    source = TensorDict(load_file(folder / "model.safetensors"))
    read_weights(source, config, dtype=torch.float32, device=CPU)
    assert not source._tensors


def test_unknown_checkpoints_go_to_the_adapter(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    assert config_of(raw) is not None
    assert config_of({**raw, "quantization_config": {"quant_method": "gptq"}}) is not None
    assert config_of({**raw, "quantization_config": {"quant_method": "hqq"}}) is None
    assert config_of({**raw, "model_type": "mamba"}) is None
    assert config_of({**raw, "hidden_act": "relu"}) is None
    assert config_of({**raw, "rope_parameters": {"rope_type": "mrope", "rope_theta": 1.0}}) is None


def test_longer_contexts_are_asked_for(folder: Path) -> None:
    config = load_model(str(folder), device="cpu", max_len=64).max_len
    assert config == 64
    with pytest.raises(OptionError, match="max_len = 0"):
        load_model(str(folder), device="cpu", max_len=0)


def test_a_real_checkpoint(stories15m: Path) -> None:
    theirs = LlamaForCausalLM.from_pretrained(stories15m, dtype=torch.float32)
    ours = load_model(str(stories15m), device="cpu")
    assert ours.vocab_size == 32000 and ours.max_len == 256
    tokens = [1, 9038, 2501, 263, 931, 29892, 727, 471, 263, 2217, 7826, 4257, 365, 2354, 29889]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    cache = ours.new_cache(1)
    ours.prefill([tokens[:-3]], cache)
    found = ours.score(TokenTree.chain(torch.tensor([tokens[-3:]])), cache).logits[0]
    torch.testing.assert_close(found, expected[-3:], atol=1e-4, rtol=0)


def test_configs_are_values() -> None:
    raw = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = config_of({**raw, "num_attention_heads": 2})
    assert config is not None and replace(config) == config and hash(config) == hash(replace(config))
