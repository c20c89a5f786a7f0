"""The other formats: MLP speculator, ReDrafter, P-EAGLE, DFlash, exported, run through a restatement of their engines' maths.

As in test_head_export.py, the restatements use nothing of ours but the files, one place at a time.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_head_export import Restated, exported, norm, turned
from test_heads import TARGET, TEXT, packed
from tiny_heads import CHANGES, random_head, random_heads
from torch import Tensor

from outrider.core.errors import OptionError
from outrider.models.heads import load_head
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput
from outrider.models.heads.export import export_head
from outrider.models.heads.inspect import inspect_folder

PLACE, DEPTHS = 9, 4


def ours(head, batch) -> list[Tensor]:
    """Our logits below PLACE."""
    with torch.no_grad():
        states = list(head.depths(batch, DEPTHS))
        return [head.over_target(head.readout(depth, states[depth][0, PLACE])) for depth in range(DEPTHS)]


def same(theirs: list[Tensor], mine: list[Tensor]) -> None:
    for one, other in zip(theirs, mine, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_mlp_speculator_in_other_engines_maths(tmp_path: Path, tied: bool) -> None:
    head, t, config = exported("mlp-speculator", "vllm", tmp_path, tie_weights=tied)
    assert set(config) >= {"emb_dim", "inner_dim", "n_predict", "top_k_tokens_per_head"} and "target_norm.weight" not in t
    assert len(config["top_k_tokens_per_head"]) == config["n_predict"]
    batch = packed([TEXT], head.config.taps)
    state = norm(batch.features[0, PLACE], head.target_norm.weight, 1e-5).detach()  # type: ignore[arg-type]
    state = norm(state, torch.ones(len(state)), 1e-6) / 2**0.5
    share = 0.5 ** (0.5 / config["n_predict"])
    emb_weight = math.sqrt((1 - share**2) * (config["inner_dim"] / 2))
    found = []
    for stage in range(DEPTHS):
        mixed = t[f"proj.{stage}.weight"] @ state + emb_weight / share * t[f"emb.{stage}.weight"][TEXT[PLACE + 1 + stage]]
        x = norm(mixed, t[f"ln.{stage}.weight"], 1e-6) + t[f"ln.{stage}.bias"]
        state = x * 0.5 * (1 + torch.erf(x / 2**0.5))
        found.append(t[f"head.{stage}.weight"] @ state)
    same(found, ours(head, batch))


def test_public_mlp_speculators_are_read(tmp_path: Path) -> None:
    """A prefix before every name, tied stages written once, the final norm left to the target."""
    head, _, _ = exported("mlp-speculator", "vllm", tmp_path, tie_weights=True)
    t = load_file(tmp_path / "model.safetensors")
    once = {name: x for name, x in t.items() if name.split(".")[1] == "0" or name == "proj.1.weight"}
    save_file({f"speculator.{name}": tensor for name, tensor in once.items()}, tmp_path / "model.safetensors")
    ends = EmbeddingAndOutput(torch.zeros(61, 32), head.target_norm.weight.detach(), torch.zeros(61, 32), tied=False)  # type: ignore[arg-type]
    again = load_head(tmp_path, TARGET, ends=ends)
    assert again.config.taps == (TARGET.num_layers,) and again.config.tie_stages
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    report = inspect_folder(tmp_path)
    assert not report.problems and any("target_norm" in note for note in report.notes)


def test_redrafter_in_other_engines_maths(tmp_path: Path) -> None:
    head, t, config = exported("redrafter", "apple", tmp_path)
    assert (
        config["rnn"]
        and config["num_draft_layers"] == 2
        and set(t) >= {"rnn_u.bias", "lm_head.1.linear.bias", "lm_head.2.weight"}
    )
    batch = packed([TEXT], head.config.taps)
    hidden = norm(batch.features[0, PLACE], head.target_norm.weight, 1e-5).detach()  # type: ignore[arg-type]
    embedding, state, found = head.state_dict()["embed_tokens.weight"], torch.zeros(32), []
    for depth in range(DEPTHS):
        mixed = t["rnn_w.weight"] @ embedding[TEXT[PLACE + 1 + depth]] + t["rnn_u.weight"] @ state + t["rnn_u.bias"]
        state = mixed * torch.sigmoid(mixed)
        x = t["input_proj.weight"] @ torch.cat([hidden, state]) + t["input_proj.bias"]
        for block in range(config["num_draft_layers"]):
            y = t[f"lm_head.{block}.linear.weight"] @ x + t[f"lm_head.{block}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        found.append(t[f"lm_head.{config['num_draft_layers']}.weight"] @ x)
    same(found, ours(head, batch))
    ends = EmbeddingAndOutput(embedding, head.target_norm.weight.detach(), embedding, tied=False)  # type: ignore[arg-type]
    again = load_head(tmp_path, TARGET, ends=ends)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_p_eagle_in_other_engines_maths(tmp_path: Path) -> None:
    """All open places behind the columns in one pass: each sees the columns and the places before it."""
    head, t, config = exported("p-eagle", "vllm", tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["ptd_token_id"] == config["pard_token"] == 3
    batch, eps = packed([TEXT], head.config.taps), config["rms_norm_eps"]
    layers = [Restated(t, f"layers.{index}.", config) for index in range(config["num_hidden_layers"])]
    features = [*batch.features[0, : PLACE + 1], *[t["mask_hidden"][0, 0]] * (DEPTHS - 1)]
    tokens, found = [*TEXT[1 : PLACE + 2], *[config["ptd_token_id"]] * (DEPTHS - 1)], []
    for position, (feature, token) in enumerate(zip(features, tokens, strict=True)):
        state = t["fc.weight"] @ feature
        for index, layer in enumerate(layers):
            first = norm(t["embed_tokens.weight"][token], t["layers.0.input_layernorm.weight"], eps)
            entering = torch.cat([first, norm(state, t["layers.0.hidden_norm.weight"], eps)])
            if index:
                entering = norm(state, t[f"layers.{index}.input_layernorm.weight"], eps)
            state = layer(state, entering, layer.past, position)
        if position >= PLACE:
            logits = torch.full((config["vocab_size"],), -torch.inf)
            logits[torch.arange(len(t["d2t"])) + t["d2t"]] = t["lm_head.weight"] @ norm(state, t["norm.weight"], eps)
            found.append(logits)
    same(found, ours(head, batch))
    again = load_head(tmp_path, TARGET)
    assert again.config.kind == "p-eagle" and again.config.num_depths is None
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def block_states(t: dict[str, Tensor], c: dict[str, Any], features: Tensor) -> list[Tensor]:
    """A block's places after the final norm, vLLM's way: keys and values of the fused features are in the cache of every layer
    before the block is asked."""
    heads, shared, size, eps = (c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"))

    def entries(x: Tensor, p: str, position: int) -> tuple[Tensor, Tensor]:
        key, value = (t[f"{p}self_attn.{name}_proj.weight"] @ x for name in "kv")
        key = norm(key.view(shared, size), t[f"{p}self_attn.k_norm.weight"], eps)
        return turned(key, position, c["rope_theta"]), value.view(shared, size)

    fused = [norm(t["fc.weight"] @ feature, t["hidden_norm.weight"], eps) for feature in features[: PLACE + 1]]
    tokens = [TEXT[PLACE + 1], *[c["dflash_config"]["mask_token_id"]] * (c["block_size"] - 1)]
    states = [t["embed_tokens.weight"][token] for token in tokens]
    for layer in range(c["num_hidden_layers"]):
        p = f"layers.{layer}."
        entering = [norm(state, t[f"{p}input_layernorm.weight"], eps) for state in states]
        seen = [entries(x, p, at) for at, x in enumerate(fused)] + [
            entries(x, p, PLACE + 1 + at) for at, x in enumerate(entering)
        ]
        for at, x in enumerate(entering):
            query = norm((t[f"{p}self_attn.q_proj.weight"] @ x).view(heads, size), t[f"{p}self_attn.q_norm.weight"], eps)
            query, out = turned(query, PLACE + 1 + at, c["rope_theta"]), []
            for head in range(heads):
                weights = torch.stack([query[head] @ key[head * shared // heads] for key, _ in seen]) / math.sqrt(size)
                values = torch.stack([value[head * shared // heads] for _, value in seen])
                out.append(weights.softmax(0) @ values)
            state = states[at] + t[f"{p}self_attn.o_proj.weight"] @ torch.cat(out)
            fed = norm(state, t[f"{p}post_attention_layernorm.weight"], eps)
            gate, up = t[f"{p}mlp.gate_proj.weight"] @ fed, t[f"{p}mlp.up_proj.weight"] @ fed
            states[at] = state + t[f"{p}mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return [norm(state, t["norm.weight"], eps) for state in states]


def test_dflash_in_other_engines_maths(tmp_path: Path) -> None:
    """All places of a block in one pass, after the features: each sees these and the whole block."""
    head, t, config = exported("dflash", "vllm", tmp_path, taps=[1, 2])
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 1 + DEPTHS
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 1]}
    batch = packed([TEXT], head.config.taps)
    states = block_states(t, config, batch.features[0])
    same([t["lm_head.weight"] @ state for state in states[1:]], ours(head, batch))
    again = load_head(tmp_path, TARGET)
    assert again.config.kind == "dflash" and again.config.num_depths == DEPTHS and again.config.taps == (1, 2)
    assert again.config.mask_token == 3 and inspect_folder(tmp_path).problems == []
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    left = {name: tensor for name, tensor in t.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(left, tmp_path / "model.safetensors")  # as public ones do
    readout = t["lm_head.weight"]
    public = load_head(tmp_path, TARGET, ends=EmbeddingAndOutput(t["embed_tokens.weight"], torch.ones(32), readout, tied=False))
    assert torch.equal(public.state_dict()["lm_head.weight"], readout)
    layer = {key: value for key, value in config.items() if key not in ("dflash_config", "block_size", "architectures")}
    other = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "transformer_layer_config": layer}
    other |= {"block_size": 1 + DEPTHS, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3, "draft_vocab_size": 61}
    (tmp_path / "config.json").write_text(json.dumps(other))
    nested = load_head(tmp_path, TARGET, ends=EmbeddingAndOutput(t["embed_tokens.weight"], torch.ones(32), readout, tied=False))
    assert nested.config.taps == (1, 2) and nested.config.num_layers == 2 and nested.config.mask_token == 3
    with pytest.raises(OptionError, match="train with layers from 1 on"):
        export_head(random_head("dflash", taps=[0, 2]), tmp_path, form="vllm")


@pytest.mark.parametrize("kind", list(CHANGES))
def test_every_kind_is_inspected(tmp_path: Path, kind: str) -> None:
    folder = Path(random_heads(kind, tmp_path / kind))
    report = inspect_folder(folder)
    assert not report.problems and report.facts["kind"] == kind and "outrider" in report.facts["served by"]
    tensors = load_file(folder / "model.safetensors")
    name = next(
        name for name in sorted(tensors) if name.endswith("weight") and "target_norm" not in name and "embed" not in name
    )
    save_file({n: tensor for n, tensor in tensors.items() if n != name}, folder / "model.safetensors")
    missing = inspect_folder(folder)
    assert any(name in line for line in [*missing.problems, *missing.notes])


def test_what_has_no_other_format_is_refused(tmp_path: Path) -> None:
    for kind in ("mtp", "mtp-parallel", "l-mtp"):
        with pytest.raises(OptionError, match="they run here only"):
            export_head(random_head(kind), tmp_path, form="vllm")
    with pytest.raises(OptionError, match="reduced vocabulary"):
        export_head(random_head("mlp-speculator", draft_vocab_size=40), tmp_path, form="vllm")
    folder = Path(random_heads("redrafter", tmp_path / "r"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "rnn": False}))
    assert any("rnn is off" in problem for problem in inspect_folder(folder).problems)
