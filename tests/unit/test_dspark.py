"""DSpark: the public layout in its own maths, what the two small heads learn, and drafts that end by confidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_run import assert_goes_on_exactly
from safetensors.torch import load_file, save_file
from test_head_export import exported
from test_head_formats import DEPTHS, PLACE, block_states, ours, same
from test_heads import TARGET, TEXT, packed
from test_methods import PROMPTS, serve, tokens
from tiny_heads import random_head, random_heads
from torch import Tensor

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Doubt, Observation, Plan, Policy, Stateless
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.methods import compose
from outrider.models.heads import load_head
from outrider.models.heads.dspark import DsparkHead
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.export import export_head
from outrider.models.heads.inspect import inspect_folder
from outrider.train.objective import HeadObjective, HeadSettings, acceptance_chance

FORMS = ("vanilla", "gated", "rnn")


def new_head(**changes: Any) -> DsparkHead:
    head = random_head("dspark", **changes)
    assert isinstance(head, DsparkHead)
    return head


def restated(t: dict[str, Tensor], c: dict[str, Any], features: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and confidences below PLACE along TEXT, from the files alone."""
    logits, sure, memory = [], [], torch.zeros(c["markov_rank"])
    for depth, state in enumerate(block_states(t, c, features)):
        mixed = before = t["markov_head.markov_w1.weight"][TEXT[PLACE + 1 + depth]]
        if c["markov_head_type"] == "gated":
            raw = t["markov_head.gate_proj.weight"] @ torch.cat([state, before]) + t["markov_head.gate_proj.bias"]
            mixed = before / (1 + torch.exp(-raw))
        if c["markov_head_type"] == "rnn":
            joint = torch.cat([memory, before, state])
            gate, new, out = (t["markov_head.joint_proj.weight"] @ joint + t["markov_head.joint_proj.bias"]).chunk(3)
            kept = 1 / (1 + torch.exp(-gate))
            memory, mixed = kept * memory + (1 - kept) * torch.tanh(new), torch.tanh(out)
        logits.append(t["lm_head.weight"] @ state + t["markov_head.markov_w2.weight"] @ mixed)
        sure.append(t["confidence_head.proj.weight"][0] @ torch.cat([state, before]) + t["confidence_head.proj.bias"][0])
    return logits, sure


@pytest.mark.parametrize("form", FORMS)
def test_the_public_layout_in_its_own_maths(tmp_path: Path, form: str) -> None:
    head, t, config = exported("dspark", "deepspec", tmp_path, taps=[1, 2], markov_head_type=form)
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["block_size"] == DEPTHS
    assert config["target_layer_ids"] == [0, 1] and config["mask_token_id"] == 3 and config["markov_rank"] == 8
    assert t["markov_head.markov_w2.weight"].shape == (61, 8) and t["confidence_head.proj.weight"].shape == (1, 40)
    batch = packed([TEXT], head.config.taps)
    logits, sure = restated(t, config, batch.features[0])
    same(logits, ours(head, batch))
    with torch.no_grad():
        states = list(head.depths(batch, DEPTHS))
        same(sure, [head.confidence(state[0, PLACE]) for state in states])
    again = load_head(tmp_path, TARGET)
    assert again.config.kind == "dspark" and again.config.num_depths == DEPTHS and again.config.taps == (1, 2)
    assert inspect_folder(tmp_path).problems == []
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_public_folders_are_read(tmp_path: Path) -> None:
    """Without the target's ends; in the words of the speculators package; in DFlash's layout; with a reduced vocabulary."""
    head, t, config = exported("dspark", "vllm", tmp_path, taps=[1, 2], markov_head_type="vanilla", draft_vocab_size=40)
    assert "d2t" in t and t["lm_head.weight"].shape == (40, 32)
    ends = EmbeddingAndOutput(t["embed_tokens.weight"], torch.ones(32), torch.zeros(61, 32), tied=False)
    save_file({n: x for n, x in load_file(tmp_path / "model.safetensors").items() if n != "embed_tokens.weight"},
              tmp_path / "model.safetensors")  # fmt: skip
    again = load_head(tmp_path, TARGET, ends=ends)
    assert torch.equal(again.target_ids, head.target_ids)
    own = ("dflash_config", "block_size", "architectures", "target_layer_ids", "mask_token_id", "markov_rank")
    layer = {key: value for key, value in config.items() if key not in own}
    other = {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "transformer_layer_config": layer}
    other |= {"block_size": 1 + DEPTHS, "sample_from_anchor": False, "markov_rank": 8, "markov_head_type": "vanilla"}
    other |= {"aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3, "draft_vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(other))
    nested = load_head(tmp_path, TARGET, ends=ends)
    assert isinstance(nested, DsparkHead) and nested.skipped == 1 and nested.num_places == 1 + DEPTHS
    assert nested.config.taps == (1, 2) and nested.config.num_depths == DEPTHS
    assert len(list(nested.depths(packed([TEXT], (1, 2)), DEPTHS))) == DEPTHS


def test_what_is_not_valid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="use format deepspec"):
        export_head(new_head(taps=[1, 2]), tmp_path, form="vllm")
    with pytest.raises(OptionError, match="train with layers from 1 on"):
        export_head(new_head(taps=[0, 2]), tmp_path, form="deepspec")
    with pytest.raises(ModelError, match="method 'dflash'"):
        new_head(markov_rank=0)
    with pytest.raises(ModelError, match="'gated'"):
        new_head(markov_head_type="gate")


@pytest.mark.parametrize("form", FORMS)
def test_a_place_depends_on_the_token_before_it(form: str) -> None:
    """The vanilla head sees one token back, the recurrent one all of the block's."""
    head = new_head(markov_head_type=form)
    batch = packed([TEXT], head.config.taps)
    with torch.no_grad():
        places = head.norm(torch.stack(head.blocks(batch), 1)[0, :, PLACE])
        laws = list[Tensor]()
        for first in (5, 6):
            memory = head.memory(places[0])
            for place, token in zip(places[:3], (first, 9, 9), strict=True):
                state, memory = head.follow(place, torch.tensor(token), memory)
                laws.append(head.readout(0, state))
    moved = [float((one - other).abs().max()) > 1e-4 for one, other in zip(laws[:3], laws[3:], strict=True)]
    assert moved == [True, form == "rnn", form == "rnn"]


def test_the_confidence_head_learns_the_chance_of_acceptance() -> None:
    head = new_head()
    head.freeze()
    objective = HeadObjective(head, TARGET, HeadSettings(num_depths=4, decay=0.78, loss="l1-kl", confidence_weight=1.0))
    batch, before = packed([TEXT, TEXT[::-1]], head.config.taps), head.embed_tokens.weight.clone()
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=1e-2)

    def error() -> float:
        with torch.no_grad():
            states, wrong = list(head.depths(batch, 4)), []
            for depth, state in enumerate(states):
                teacher = TARGET.logits(batch.shifted(batch.last, depth + 1))
                chance = acceptance_chance(head.readout(depth, state), teacher, None)
                wrong.append((torch.sigmoid(head.confidence(state)) - chance).abs()[batch.valid(depth + 1)].mean())
            return float(torch.stack(wrong).mean())

    first, losses = error(), list[float]()
    for _ in range(50):
        loss = objective(batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.6 * losses[0] and error() < 0.5 * first
    assert torch.equal(head.embed_tokens.weight, before)
    with pytest.raises(OptionError, match="dflash heads have no confidence head"):
        HeadObjective(random_head("dflash"), TARGET, HeadSettings(confidence_weight=1.0))(batch)


def test_the_chance_of_acceptance_counts_what_the_draft_cannot_say() -> None:
    p, q = torch.tensor([0.5, 0.2, 0.3]), torch.tensor([0.9, 0.1])
    found = acceptance_chance(q.log(), p.log(), torch.tensor([0, 2]))
    assert float(found) == pytest.approx(0.6)  # min(0.5, 0.9) + min(0.3, 0.1)


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    def objective() -> HeadObjective:
        head = random_head("dspark").float()
        head.freeze()
        return HeadObjective(head, TARGET, HeadSettings(num_depths=3, confidence_weight=1.0, noise=0.1))

    assert_goes_on_exactly(objective, tmp_path)


def test_doubt_keeps_the_guesses_that_are_worth_it() -> None:
    beliefs = [[0.9, 0.9, 0.9, 0.9], [0.9, 0.1, 0.9], [0.05]]
    assert Doubt((0.0,), (0.0,), (1.0, 1.0, 1.0)).lengths(beliefs) == [4, 3, 1]
    assert Doubt((0.0,), (0.2,), (1.0, 1.0, 1.0)).lengths(beliefs) == [4, 1, 0]
    assert Doubt((0.0,), (0.2,), (0.6, 1.0, 1.0)).lengths(beliefs) == [2, 1, 0]  # 0.54, 0.29, 0.16
    assert Doubt((2.0,), (0.0,), (1.0, 1.0, 1.0)).lengths(beliefs) == [1, 1, 1]  # the first guess is free: it was drafted
    assert Doubt((0.8,), (0.0,), (1.0, 1.0, 1.0)).lengths(beliefs) == [3, 3, 1]
    assert Doubt((9.0, 0.0, 2.0), (0.0,), (1.0, 1.0, 1.0)).lengths(beliefs) == [2, 2, 1], "prices are by the guess"


class Doubting(Policy):
    """Four guesses, of which those worth 0.15 tokens are kept."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.believed: list[int] = []

    def start(self, num_rows: int) -> Stateless:
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        return Plan((4,) * num_rows, (4,) * num_rows, doubt=Doubt((0.0,), (0.15,), (1.0,) * num_rows))

    def update(self, state: Stateless, observation: Observation) -> None:
        self.kept += [size - 1 for size in observation.draft.tree.sizes]
        self.believed += [len(row) for row in observation.draft.beliefs or [()] * observation.draft.tree.batch_size]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_end_by_confidence_and_the_text_stays(tmp_path: Path, temperature: float) -> None:
    folder = random_heads("dspark", tmp_path / "d", markov_head_type="vanilla")
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3)
    expected = tokens(serve(TARGET, compose("plain", TARGET), PROMPTS, params))
    drafting, policy = compose("dspark", TARGET, options={"heads": folder}), Doubting()
    method = Method(drafting.drafter, drafting.rule, policy)
    assert tokens(serve(TARGET, method, PROMPTS, params, batch=4)) == expected
    assert policy.kept == policy.believed and len(set(policy.kept)) > 2
