"""Pruning: parts that do nothing are found and left out, what is kept computes the same, and drafts in int8 change no text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_train import CORPUS

from outrider.api import LLM
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.models.config import config_of
from outrider.train.data import Document
from outrider.train.draft_lm import DraftLM
from outrider.train.prune import _alone, best, importance_of, pruned

RAW = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
IDLE_LAYER, IDLE_UNITS = 2, (3, 11, 12)


def model_with_idle_parts() -> DraftLM:
    """Its third layer adds nothing, and some units of every MLP add next to nothing."""
    config = config_of(RAW)
    assert config is not None
    torch.manual_seed(0)
    model = DraftLM(config, RAW, Path("nowhere"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(f"layers.{IDLE_LAYER}.self_attn.o_proj.weight") or f"layers.{IDLE_LAYER}.mlp.down" in name:
                parameter.zero_()
            elif name.endswith("down_proj.weight"):
                parameter[:, list(IDLE_UNITS)] *= 1e-7
    return model


def test_parts_that_do_nothing_are_left_out_and_nothing_changes() -> None:
    model = model_with_idle_parts()
    documents = CORPUS.train[:4]
    found = importance_of(model, documents)
    assert int(found.layers.argmin()) == IDLE_LAYER and float(found.layers.min()) < 1e-5
    for layer in (0, 1, 3):
        assert not set(best(found.units[layer], 21)) & set(IDLE_UNITS)
    smaller = pruned(model, found, num_layers=3, mlp_size=21)
    assert (smaller.config.num_layers, smaller.config.mlp_size) == (3, 21) and smaller.raw["intermediate_size"] == 21
    batch = _alone(documents[0], torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(smaller(batch), model(batch), atol=1e-4, rtol=1e-4)
    again = importance_of(model, documents)
    torch.testing.assert_close(again.units, found.units)  # the hooks of the first time are gone


def test_sizes_that_do_not_fit_are_refused() -> None:
    model = model_with_idle_parts()
    found = importance_of(model, [Document((1, 2, 3))])
    for sizes in ({"num_layers": 5, "mlp_size": 24}, {"num_layers": 1, "mlp_size": 0}):
        with pytest.raises(OptionError, match="is not valid; the model has"):
            pruned(model, found, **sizes)


def test_the_command_makes_a_draft_for_the_bundled_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in int8, and the text stays that of plain decoding."""
    data, out = tmp_path / "own.jsonl", tmp_path / "draft"
    data.write_text("".join(json.dumps({"tokens": [5 + (i * j) % 4000 for j in range(20)]}) + "\n" for i in range(1, 4)))
    assert main(["prune", "--data", str(data), "--out", str(out), "--layers", "2", "--mlp", "128"]) == 0
    assert "million numbers" in capsys.readouterr().out
    raw, notes = (json.loads((out / name).read_text()) for name in ("config.json", "provenance.json"))
    assert raw["num_hidden_layers"] == 2 and raw["intermediate_size"] == 128 and len(notes["layers"]) == 2
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for draft_dtype in (None, "int8"):
        llm = LLM(bundled_path("target"), draft=str(out), dtype="float32", draft_dtype=draft_dtype, num_draft_tokens=3)
        texts += [llm.generate("One day,", params, method=llm.compose(name))[0].token_ids for name in ("plain", "draft-model")]
    assert texts[0] == texts[1] == texts[2] == texts[3]
