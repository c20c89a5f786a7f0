"""Where a model comes from: a revision on the hub, and folders that bring Python code of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_hf_adapter import MODELS, random_model

from outrider.core.errors import ModelError
from outrider.models.hf import HFModel
from outrider.models.load import load_model
from outrider.models.source import Source, local_path

OWN_CODE = """
from transformers import GPT2Config, GPT2LMHeadModel

class OwnConfig(GPT2Config):
    model_type = "own-kind"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_a_revision_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetched(name: str, **options: Any) -> str:
        asked.update(name=name, **options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert local_path(Source("owner/model", revision="v2")) == tmp_path
    assert asked["name"] == "owner/model" and asked["revision"] == "v2"


def folder_with_code(folder: Path) -> Path:
    model = random_model(*MODELS["gpt2"])
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own-kind", "auto_map": names}))
    (folder / "own_code.py").write_text(OWN_CODE)
    return folder


def test_code_of_a_folder_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = folder_with_code(tmp_path / "own")
    with pytest.raises(ModelError, match=r"brings Python code of its own.*--trust-remote-code"):
        load_model(str(folder), dtype="float32", device="cpu")
    target = load_model(Source(str(folder), trust_remote_code=True), dtype="float32", device="cpu")
    assert type(target) is HFModel and type(target.model).__name__ == "OwnModel"
