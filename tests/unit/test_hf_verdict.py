"""The verdict on a model behind the adapter: found out once, kept for the configuration, and obeyed by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_hf_adapter import LLAMA, MODELS, random_model

import outrider.models.hf as hf
from outrider.core.errors import ModelError
from outrider.models.hf import HFModel
from outrider.models.hf_verdict import TextPromise, verdict_path
from outrider.models.load import load_model

BLOOM = ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    return folder


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were tried, in order."""
    names: list[str] = []
    check = hf.check_model

    def noted(model: Any, raw: Any) -> TextPromise:
        names.append(type(raw).__name__)
        return check(model, raw)

    monkeypatch.setattr(hf, "check_model", noted)
    return names


def saved(folder: Path, kind: str, options: dict[str, Any]) -> str:
    random_model(kind, options).save_pretrained(folder)
    return str(folder)


def opened(folder: str, **options: Any) -> Any:
    return load_model(folder, device="cpu", **options)


def test_a_model_is_tried_once(cache: Path, tmp_path: Path, tried: list[str]) -> None:
    folder = saved(tmp_path / "model", *MODELS["gpt2"])
    assert opened(folder).max_len == opened(folder).max_len == 64
    assert len(tried) == 1 and len(list(cache.glob("adapter-*.json"))) == 1


def test_whatever_could_change_the_verdict_is_tried_again(cache: Path, tmp_path: Path, tried: list[str]) -> None:
    folder = saved(tmp_path / "model", *MODELS["gpt2"])
    opened(folder)
    opened(folder, max_len=32)
    opened(folder, dtype="bfloat16")
    kind, options = MODELS["gpt2"]
    opened(saved(tmp_path / "wider", kind, {**options, "n_head": 2}))
    assert len(tried) == 4 and len(list(cache.glob("adapter-*.json"))) == 4


def test_a_copy_of_the_folder_has_the_same_verdict(cache: Path, tmp_path: Path, tried: list[str]) -> None:
    opened(saved(tmp_path / "one", *MODELS["gpt2"]))
    opened(saved(tmp_path / "two", *MODELS["gpt2"]))
    assert len(tried) == 1


def test_a_refusal_is_kept_with_its_reason(cache: Path, tmp_path: Path, tried: list[str]) -> None:
    for name in ("one", "two"):
        folder = saved(tmp_path / name, *BLOOM)
        with pytest.raises(ModelError, match=rf"{folder}: BloomForCausalLM .*ALiBi.*use another model"):
            opened(folder)
    assert len(tried) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"max_len": 3}', "\udcff"])
def test_a_damaged_verdict_is_found_out_again(cache: Path, tmp_path: Path, tried: list[str], content: str) -> None:
    folder = saved(tmp_path / "model", *MODELS["gpt2"])
    opened(folder)
    next(cache.glob("adapter-*.json")).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert opened(folder).max_len == 64
    assert len(tried) == 2


def test_a_model_in_memory_is_tried_every_time(cache: Path, tried: list[str]) -> None:
    """Its owner may have changed it: a verdict on its configuration says nothing."""
    model = random_model("gpt_neox", {**LLAMA, "max_position_embeddings": 64})
    HFModel(model)
    HFModel(model)
    assert len(tried) == 2 and not list(cache.glob("adapter-*.json"))


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    folder = saved(tmp_path / "model", *MODELS["gpt2"])
    assert opened(folder).max_len == 64
    assert not verdict_path(opened(folder).model, 64).exists()
