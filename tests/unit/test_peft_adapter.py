"""Adapters in PEFT's layout against PEFT's arithmetic, written out for single matrices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.peft_adapter import PeftAdapter, merge_adapter

_Q = "model.layers.0.self_attn.q_proj"


def _adapter(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    folder.mkdir()
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return folder


def _pair(name: str, *, rows: int = 5, columns: int = 4, rank: int = 3) -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": torch.randn(rank, columns), f"{name}.lora_B.weight": torch.randn(rows, rank)}


def _product(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Sum by sum, as the definition says it."""
    a, b = tensors[f"{name}.lora_A.weight"].double(), tensors[f"{name}.lora_B.weight"].double()
    out = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float64)
    for row in range(b.shape[0]):
        for column in range(a.shape[1]):
            out[row, column] = sum(float(b[row, k]) * float(a[k, column]) for k in range(a.shape[0]))
    return out


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 6 / math.sqrt(3)),
        ({"alpha_pattern": {"q_proj": 12}}, 4.0),
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 6}, "alpha_pattern": {"k_proj": 1}}, 1.0),
        ({"alpha_pattern": {"proj": 99}}, 2.0),
    ],
    ids=["plain", "rslora", "alpha", "rank", "no-match"],
)
def test_a_matrix_gets_the_scaled_product(tmp_path: Path, settings: dict[str, Any], scale: float) -> None:
    tensors, base = _pair(_Q), torch.randn(5, 4)
    merged = PeftAdapter(_adapter(tmp_path / "a", tensors, **settings)).apply(f"{_Q}.weight", base)
    torch.testing.assert_close(merged.double(), base.double() + scale * _product(tensors, _Q), atol=1e-5, rtol=1e-5)


def test_matrices_stored_the_other_way_round(tmp_path: Path) -> None:
    tensors, base = _pair(_Q), torch.randn(4, 5)
    merged = PeftAdapter(_adapter(tmp_path / "a", tensors, fan_in_fan_out=True)).apply(f"{_Q}.weight", base)
    torch.testing.assert_close(merged.double(), base.double() + 2 * _product(tensors, _Q).T, atol=1e-5, rtol=1e-5)


def test_an_embedding_gets_the_transposed_product(tmp_path: Path) -> None:
    a, b, base = torch.randn(3, 7), torch.randn(4, 3), torch.randn(7, 4)
    name = "model.embed_tokens"
    adapter = PeftAdapter(_adapter(tmp_path / "a", {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}))
    merged = adapter.apply(f"{name}.weight", base)
    torch.testing.assert_close(merged.double(), base.double() + 2 * (b.double() @ a.double()).T, atol=1e-5, rtol=1e-5)


def test_dora_gives_every_row_its_own_length(tmp_path: Path) -> None:
    lengths, base = torch.rand(5) + 0.5, torch.randn(5, 4)
    tensors = {**_pair(_Q), f"{_Q}.lora_magnitude_vector": lengths}
    merged = PeftAdapter(_adapter(tmp_path / "a", tensors, use_dora=True)).apply(f"{_Q}.weight", base)
    plain = base.double() + 2 * _product(tensors, _Q)
    for row in range(5):
        wanted = lengths[row] * plain[row] / math.sqrt(float((plain[row] ** 2).sum()))
        torch.testing.assert_close(merged[row].double(), wanted, atol=1e-5, rtol=1e-5)


def _base(folder: Path) -> Path:
    folder.mkdir()
    save_file(
        {f"{_Q}.weight": torch.randn(5, 4).half(), "lm_head.weight": torch.randn(6, 4).half()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_merged_folder_is_a_checkpoint_of_the_same_type(tmp_path: Path) -> None:
    base, head = _base(tmp_path / "base"), torch.randn(6, 4)
    tensors = _pair(_Q)
    adapter = _adapter(tmp_path / "a", {**tensors, "lm_head.modules_to_save.weight": head})
    merge_adapter(base, adapter, tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: tensor.dtype for name, tensor in before.items()}
    assert torch.equal(after["lm_head.weight"], head.half())
    wanted = (before[f"{_Q}.weight"].double() + 2 * _product(tensors, _Q)).half()
    torch.testing.assert_close(after[f"{_Q}.weight"], wanted, atol=2e-2, rtol=2e-3)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert torch.equal(load_file(base / "model.safetensors")[f"{_Q}.weight"], before[f"{_Q}.weight"]), "the base is untouched"


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (_pair("model.layers.9.q_proj"), {}, "trained on"),
        (_pair(_Q, rows=9), {}, "shape"),
        ({f"{_Q}.lora_A.weight": torch.ones(3, 4)}, {}, "lora_B"),
        (_pair(_Q), {"peft_type": "IA3"}, "IA3.*merge"),
        (_pair(_Q), {"layer_replication": [[0, 1]]}, "layer_replication"),
    ],
    ids=["module", "shape", "half", "kind", "setting"],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, tensors: Any, settings: dict[str, Any], message: str) -> None:
    adapter = _adapter(tmp_path / "a", tensors, **settings)
    with pytest.raises(ModelError, match=message):
        merge_adapter(_base(tmp_path / "base"), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="save_pretrained"):
        PeftAdapter(tmp_path)
