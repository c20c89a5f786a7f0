"""Draft models as GGUF files: read back by the gguf package, by our own reader, and run to the same text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from divided import checkpoint

from outrider import LLM, OptionError, SamplingParams
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.models.gguf.writer import write_gguf
from outrider.models.weights import SafetensorsFolder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "draft.gguf"
    assert main(["export", bundled_path("draft"), "gguf", "--out", str(out), "--dtype", "float32"]) == 0
    return out


def test_the_gguf_package_reads_it_back(draft: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(draft)
    raw = json.loads((Path(bundled_path("draft")) / "config.json").read_text())
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.block_count"].contents() == raw["num_hidden_layers"]
    assert reader.fields["llama.attention.head_count_kv"].contents() == raw["num_key_value_heads"]
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == raw["vocab_size"]
    assert [kind.name for kind in reader.fields["tokenizer.ggml.token_type"].types] == ["ARRAY", "INT32"], "others are refused"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    source = SafetensorsFolder(Path(bundled_path("draft")))
    assert len(tensors) == len([name for name in source.names if name != "lm_head.weight"])
    theirs = source.read("model.layers.0.mlp.down_proj.weight").float().numpy()
    assert np.array_equal(tensors["blk.0.ffn_down.weight"].data, theirs)
    keys = source.read("model.layers.0.self_attn.k_proj.weight").float()
    half = raw["head_dim"] // 2
    assert np.array_equal(tensors["blk.0.attn_k.weight"].data[1], keys[half].numpy()), "rotary pairs are neighbours"


def test_its_text_and_its_tokens_are_the_folders(draft: Path) -> None:
    folder, file = (LLM(name, method="plain", dtype="float32", device="cpu") for name in (bundled_path("draft"), str(draft)))
    prompt = "Once upon a time, there were 12 little dogs."
    params = SamplingParams(max_tokens=24)
    assert folder.codec.encode(prompt) == file.codec.encode(prompt)
    assert folder.generate(prompt, params)[0].token_ids == file.generate(prompt, params)[0].token_ids
    assert folder.codec.eos_ids & file.codec.eos_ids


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(tmp_path: Path, family: str) -> None:
    changes = {"model_type": family, "attention_bias": False, "mlp_bias": False, "vocab_size": 4096}
    name = checkpoint(tmp_path / family, **changes)
    assert main(["export", name, "gguf"]) == 2, "llama.cpp needs a tokenizer"
    shutil.copy(Path(bundled_path("draft")) / "tokenizer.json", name)
    assert main(["export", name, "gguf", "--dtype", "float32"]) == 0
    texts = [
        LLM(model, method="plain", dtype="float32", device="cpu").generate([[5, 9, 11]], SamplingParams(max_tokens=12))[0]
        for model in (name, f"{name}.gguf")
    ]
    assert texts[0].token_ids == texts[1].token_ids and len(texts[0].token_ids) == 12


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemma = checkpoint(tmp_path / "gemma", model_type="gemma2", attention_bias=False, mlp_bias=False)
    assert main(["export", gemma, "gguf"]) == 2
    assert "'gemma2' cannot be written" in capsys.readouterr().err
    scaled = checkpoint(tmp_path / "scaled", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert main(["export", scaled, "gguf"]) == 2
    assert "rotary scaling" in capsys.readouterr().err
    assert main(["export", bundled_path("draft"), "gguf", "--dtype", "int8", "--out", str(tmp_path / "x.gguf")]) == 2
    assert "unknown dtype 'int8'" in capsys.readouterr().err


def test_half_precision_and_values_of_every_kind(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    keys = {
        "general.architecture": "llama",
        "a.flag": True,
        "a.count": 7,
        "a.real": 0.5,
        "a.many": [1, 2, 3],
        "a.words": ["x", "yz"],
    }
    halves = torch.arange(6, dtype=torch.float16).view(2, 3)
    write_gguf(tmp_path / "a.gguf", keys, {"m.weight": halves, "n.weight": torch.ones(5)})
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert all(reader.fields[key].contents() == value for key, value in keys.items())
    assert [tensor.name for tensor in reader.tensors] == ["m.weight", "n.weight"]
    assert np.array_equal(reader.tensors[0].data, halves.numpy())


def test_a_tokenizer_that_has_no_name_there_is_refused(tmp_path: Path) -> None:
    from outrider.models.gguf.export import export_gguf

    folder = Path(checkpoint(tmp_path / "odd"))
    described = {"model": {"type": "WordPiece", "vocab": {}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(OptionError, match="not a byte-level BPE"):
        export_gguf(folder, tmp_path / "odd.gguf", raw=json.loads((folder / "config.json").read_text()))
