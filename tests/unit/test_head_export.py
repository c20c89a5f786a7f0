"""Heads for other engines: the exported tensors, run through a restatement of those engines' own maths, give our logits.

The restatements below use nothing of ours but the files: vLLM's and SGLang's EAGLE-3 (state, embedding, two norms, raw
residual, RoPE by halves, d2t offsets), EAGLE-1 (no input norm, the target's head) and Medusa (residual blocks, one head
each), written from descriptions of the formats, not from code. They stand in for the engines, which are not installed here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_heads import TEXT, packed
from tiny_heads import random_head, random_heads
from torch import Tensor

from outrider.cli.main import main
from outrider.core.errors import OptionError
from outrider.models.heads import load_head
from outrider.models.heads.export import export_head
from outrider.models.heads.inspect import inspect_folder


def exported(kind: str, form: str, folder: Path, **more: Any):
    """Our heads in bfloat16, their export, and its config."""
    head = random_head(kind, **more).to(torch.bfloat16).float()
    export_head(head, folder, form=form)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in load_file(folder / "model.safetensors").items()}
    return head, tensors, json.loads((folder / "config.json").read_text())


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """[heads, D] rotated: pairs stand half a head apart."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half).float() / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Restated:
    """One decoder layer, one place at a time, with its own list of keys and values."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, config: dict[str, Any]) -> None:
        self.t, self.p, self.c = tensors, prefix, config
        self.past: list[tuple[Tensor, Tensor]] = []

    def __call__(self, residual: Tensor, entering: Tensor, past: list[tuple[Tensor, Tensor]], position: int) -> Tensor:
        heads, shared = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        size = self.c.get("head_dim") or self.c["hidden_size"] // heads
        q, k, v = (self.t[f"{self.p}self_attn.{name}_proj.weight"] @ entering for name in "qkv")
        q, k = (
            turned(q.view(heads, size), position, self.c["rope_theta"]),
            turned(k.view(shared, size), position, self.c["rope_theta"]),
        )
        past.append((k, v.view(shared, size)))
        out = []
        for head in range(heads):
            group = head * shared // heads
            scores = torch.stack([q[head] @ key[group] for key, _ in past]) / math.sqrt(size)
            out.append(sum(w * value[group] for w, (_, value) in zip(scores.softmax(0), past, strict=True)))
        residual = residual + self.t[f"{self.p}self_attn.o_proj.weight"] @ torch.cat(out)
        x = norm(residual, self.t[f"{self.p}post_attention_layernorm.weight"], self.c["rms_norm_eps"])
        gate, up = self.t[f"{self.p}mlp.gate_proj.weight"] @ x, self.t[f"{self.p}mlp.up_proj.weight"] @ x
        return residual + self.t[f"{self.p}mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def eagle3_logits(
    t: dict[str, Tensor], c: dict[str, Any], prefix: str, features: Tensor, place: int, depths: int
) -> list[Tensor]:
    """Logits over the target's vocabulary at depths 0 .. below ``place``."""
    layer, past, eps = Restated(t, prefix, c), [], c["rms_norm_eps"]

    def step(state: Tensor, token: int, position: int) -> Tensor:
        embedded = norm(t["embed_tokens.weight"][token], t[f"{prefix}input_layernorm.weight"], eps)
        return layer(state, torch.cat([embedded, norm(state, t[f"{prefix}hidden_norm.weight"], eps)]), past, position)

    state = features[0]
    for column in range(place + 1):
        state = step(t["fc.weight"] @ features[column], TEXT[column + 1], column)
    found = []
    for depth in range(depths):
        if depth:
            state = step(state, TEXT[place + 1 + depth], place + depth)
        logits = torch.full((c["vocab_size"],), -torch.inf)
        logits[torch.arange(len(t["d2t"])) + t["d2t"]] = t["lm_head.weight"] @ norm(state, t["norm.weight"], eps)
        found.append(logits)
    return found


@pytest.mark.parametrize(("form", "prefix"), [("vllm", "midlayer."), ("speculators", "layers.0.")])
def test_eagle3_in_other_engines_maths(tmp_path: Path, form: str, prefix: str) -> None:
    head, tensors, config = exported("eagle3", form, tmp_path)
    if form == "speculators":
        assert config["norm_before_residual"] is False and config["eagle_aux_hidden_state_layer_ids"] == list(head.config.taps)
        assert config["transformer_layer_config"]["vocab_size"] == head.config.vocab_size
        config = config["transformer_layer_config"]
    batch = packed([TEXT], head.config.taps)
    with torch.no_grad():
        states = list(head.depths(batch, 4))
    for depth, logits in enumerate(eagle3_logits(tensors, config, prefix, batch.features[0], 9, 4)):
        ours = head.over_target(head.readout(depth, states[depth][0, 9]))
        torch.testing.assert_close(logits, ours.detach(), atol=1e-3, rtol=1e-3)


def test_eagle1_in_other_engines_maths(tmp_path: Path) -> None:
    head, tensors, config = exported("eagle1", "sglang", tmp_path)
    assert (
        not tensors["fc.bias"].any()
        and "layers.0.input_layernorm.weight" not in tensors
        and "target_norm.weight" not in tensors
    )
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    batch = packed([TEXT], head.config.taps)
    features = norm(batch.features[0], head.target_norm.weight, 1e-5).detach()  # type: ignore[arg-type]
    layer, past = Restated(tensors, "layers.0.", config), []
    state = features[0]
    for column in range(8):
        fused = tensors["fc.weight"] @ torch.cat([tensors["embed_tokens.weight"][TEXT[column + 1]], features[column]])
        state = layer(fused, fused, past, column)
    fused = tensors["fc.weight"] @ torch.cat([tensors["embed_tokens.weight"][TEXT[9]], state])
    second = layer(fused, fused, past, 8)
    with torch.no_grad():
        ours = list(head.depths(batch, 2))
    torch.testing.assert_close(state, ours[0][0, 7], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(second, ours[1][0, 7], atol=1e-3, rtol=1e-3)
    assert exported("eagle1", "vllm", tmp_path / "v")[2]["architectures"] == ["LlamaForCausalLM"]


def test_medusa_in_other_engines_maths(tmp_path: Path) -> None:
    head, tensors, config = exported("medusa", "vllm", tmp_path)
    assert [key for key in config if "num" in key and ("heads" in key or "layers" in key)] == ["num_heads", "num_hidden_layers"]
    batch = packed([TEXT], head.config.taps)
    hidden = norm(batch.features[0], head.target_norm.weight, 1e-5).detach()  # type: ignore[arg-type]
    with torch.no_grad():
        for depth, states in enumerate(head.depths(batch, 4)):
            x = hidden
            for block in range(config["num_hidden_layers"]):
                name = f"blocks.{depth}.layers.{block}."
                mixed = x @ tensors[name + "weight"].T + tensors[name + "bias"]
                x = x + mixed * torch.sigmoid(mixed)
            ours = head.readout(depth, states[0])
            torch.testing.assert_close(x @ tensors[f"lm_heads.{depth}.weight"].T, ours, atol=1e-3, rtol=1e-3)


def test_other_layers_are_written_in_both_spellings(tmp_path: Path) -> None:
    _, _, config = exported("eagle3", "vllm", tmp_path, taps=[0, 1, 1])
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 0]
    with pytest.raises(OptionError, match="hydra heads have no vllm format"):
        export_head(random_head("hydra"), tmp_path / "h", form="vllm")


def test_an_exported_folder_is_read_back(tmp_path: Path) -> None:
    """As a public checkpoint: no block of ours, the target says which layers."""
    from tiny_pair import tiny_model

    for form in ("vllm", "speculators"):
        head, _, _ = exported("eagle3", form, tmp_path / form)
        again = load_head(tmp_path / form, tiny_model())
        for name, tensor in head.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_inspect_finds_what_engines_do_not_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(random_heads("eagle3", tmp_path / "e"))
    assert not inspect_folder(folder).problems and main(["inspect", str(folder)]) == 0
    assert "40 of 61 tokens" in capsys.readouterr().out
    good = load_file(folder / "model.safetensors")
    ids = good["d2t"] + torch.arange(40)
    for change, word in (
        ({"d2t": ids}, "offsets"),
        ({"t2d": ~good["t2d"]}, "t2d and d2t disagree"),
        ({"norm.weight": torch.full((32,), torch.nan)}, "no numbers"),
        ({"extra.bias": torch.zeros(3)}, "ignore it silently"),
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"d2t": None}, "d2t is missing"),
    ):
        changed = {**good, **change}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, folder / "model.safetensors")
        assert any(word in problem for problem in inspect_folder(folder).problems), word
    assert main(["inspect", str(folder), "--json"]) == 1
    save_file(good, folder / "model.safetensors")


def test_the_export_command_writes_a_folder_beside_the_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = random_heads("eagle3", tmp_path / "e")
    assert main(["export", folder, "vllm"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "e-vllm")
    assert not inspect_folder(tmp_path / "e-vllm").problems
    assert main(["export", folder, "sglang", "--out", str(tmp_path / "x")]) == 0 and (tmp_path / "x" / "config.json").is_file()
    assert main(["export", folder, "vlm"]) == 2
    assert "did you mean 'vllm'" in capsys.readouterr().err
