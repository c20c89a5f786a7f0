"""Medusa-2: the heads learn alone first, then the target learns with them and stays near what it said; what comes out runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_train import CORPUS
from tiny_pair import _RAW, VOCAB, tiny_model

from outrider.core.errors import OptionError
from outrider.models.config import config_of
from outrider.models.heads import load_head
from outrider.models.load import load_model
from outrider.train.draft_lm import DraftLM
from outrider.train.loop import Settings, train
from outrider.train.lora import LoraLinear, merged_state
from outrider.train.objective_joint import JointObjective, JointSettings

SETTINGS = Settings(max_steps=30, batch_size=8, row_len=48, judge_every=15, learning_rate=5e-3, warmup_steps=2)


def learner(folder: Path) -> DraftLM:
    """A target of the tiny shape that can learn."""
    config = config_of(_RAW)
    assert config is not None
    torch.manual_seed(3)
    model = DraftLM(config, _RAW, folder)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


@pytest.mark.parametrize("rank", [0, 4])
def test_heads_first_then_both(tmp_path: Path, rank: int) -> None:
    model = learner(tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = model.frozen()
    one = JointObjective(model, target, JointSettings(num_heads=3, head_warmup=10, lora_rank=rank))
    train([one], target, CORPUS, tmp_path / "a", settings=Settings(**{**vars(SETTINGS), "max_steps": 9}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in merged_state(one.joint.model).items())
    run = train([one], target, CORPUS, tmp_path / "b", settings=SETTINGS, notes={"data": "toy"})[0]
    now = merged_state(one.joint.model)
    assert now.keys() == before.keys() and any(not torch.equal(tensor, before[name]) for name, tensor in now.items())
    assert 0 < one.distance < 1
    changed = load_model(str(tmp_path / "b/medusa2/target"), device="cpu", fast=False)
    head = load_head(tmp_path / "b/medusa2/heads", changed)
    assert head.config.kind == "medusa" and run.best > 1
    notes = json.loads((tmp_path / "b/medusa2/heads/provenance.json").read_text())
    assert "changed from" in notes["target"] and notes["data"] == "toy"


def test_an_adapter_is_its_merged_matrix() -> None:
    adapter = LoraLinear(torch.nn.Linear(6, 5), 2)
    torch.nn.init.normal_(adapter.up)
    x = torch.randn(3, 6)
    torch.testing.assert_close(adapter(x), torch.nn.functional.linear(x, adapter.weight, adapter.linear.bias))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(OptionError, match="nothing negative"):
        JointSettings(head_weight=-1)
    assert tiny_model().vocab_size == VOCAB
