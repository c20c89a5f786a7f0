"""Heads as other engines read them.

    vllm          EAGLE-3, EAGLE-1, P-EAGLE, DFlash, Medusa, MLP speculator in vLLM's plain formats; SGLang reads the EAGLE-3
                  one too
    sglang        EAGLE-1 with the name and the bias SGLang wants
    speculators   EAGLE-3 in the format of the speculators package, which vLLM serves by itself
    apple         ReDrafter as Apple's recurrent drafting reads it; embedding and hidden states are the target's

Layer ids are the great trap: vLLM counts states *entering* a layer, SGLang layer *outputs*. Default layers are written
without ids, as both then take the same ones; others with both spellings. An output matrix is always written: engines guess
differently without.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OptionError, nearest
from outrider.models.checkpoint import write_checkpoint
from outrider.models.heads.config import default_taps
from outrider.models.heads.head import Head

FORMATS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("eagle3", "eagle1", "p-eagle", "dflash", "medusa", "mlp-speculator"),
    "sglang": ("eagle3", "eagle1"),
    "speculators": ("eagle3",),
    "apple": ("redrafter",),
}


def export_head(head: Head, out: Path, *, form: str, target_name: str = "target") -> None:
    """Write a folder for another engine."""
    if form not in FORMATS:
        raise OptionError(f"unknown format {form!r}; {nearest(form, FORMATS)}")
    kind = head.config.kind
    if kind not in FORMATS[form]:
        able = [name for name, kinds in FORMATS.items() if kind in kinds] or ["none: they run here only"]
        raise OptionError(f"{kind} heads have no {form} format; formats of {kind}: {', '.join(able)}")
    config, tensors = _parts(head, form, target_name)
    write_checkpoint(out, tensors, config=config)


def _parts(head: Head, form: str, target_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and tensors."""
    state = {name: _plain(tensor) for name, tensor in head.state_dict().items()}
    raw = {key: value for key, value in head.config.raw.items() if key != "outrider"}
    match head.config.kind:
        case "medusa":
            return _medusa_config(head), _only(state, "blocks.", "lm_heads.")
        case "mlp-speculator":
            return _whole_vocabulary(head, _mlp_config(head)), _only(state, "emb.", "proj.", "head.", "ln.")
        case "redrafter":
            return _whole_vocabulary(head, _redrafter_config(head)), _redrafter_tensors(state, head.config.num_blocks)
        case "eagle1":
            return _eagle1(head, form, raw, _only(state, "fc.", "layers.", "embed_tokens."))
        case "dflash":
            return _dflash_config(head, raw), _dflash_tensors(head, state)
        case _:
            return _eagle3(head, form, raw, state, target_name=target_name)


def _only(state: Mapping[str, Tensor], *beginnings: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(beginnings)}


def _whole_vocabulary(head: Head, config: dict[str, Any]) -> dict[str, Any]:
    if head.config.draft_vocab_size != head.config.vocab_size:
        raise OptionError(
            f"{head.config.kind} heads with a reduced vocabulary have no other format; train them with all tokens"
        )
    return config


def _eagle1(head: Head, form: str, raw: Mapping[str, Any], kept: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    names = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    raw = {key: value for key, value in raw.items() if key != "draft_vocab_size"}
    if form == "sglang":  # its fc always has a bias, left as it is in memory if the file has none
        kept["fc.bias"] = torch.zeros(head.config.hidden_size, dtype=kept["fc.weight"].dtype)
    return {**raw, "architectures": [names[form]]}, kept


def _eagle3(
    head: Head, form: str, raw: Mapping[str, Any], state: dict[str, Tensor], *, target_name: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """And P-EAGLE, which is the same with more layers and what stands in the open places."""
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[head.target_ids.cpu()] = True
    state["t2d"] = known
    if form == "speculators":
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
        return _speculators_config(head, raw, target_name), renamed
    config = {**raw, "architectures": ["LlamaForCausalLMEagle3"], **_layer_ids(head)}
    if head.config.kind == "p-eagle":
        mask = head.config.mask_token
        config |= {"num_hidden_layers": head.config.num_layers, "mask_token_id": mask, "ptd_token_id": mask, "pard_token": mask}
    return config, state


def _dflash_config(head: Head, raw: Mapping[str, Any]) -> dict[str, Any]:
    """A block counts the newest token; layers are counted by their outputs, so that the one entering layer i is i - 1."""
    config = head.config
    if 0 in config.taps:
        raise OptionError(f"dflash heads that read layers {list(config.taps)} have no vllm format; train with others than 0")
    assert config.layer is not None
    own = ("num_heads", "mask_token_id", "draft_vocab_size", "outrider")
    nested = {"mask_token_id": config.mask_token, "target_layer_ids": [tap - 1 for tap in config.taps]}
    return {
        **{key: value for key, value in raw.items() if key not in own},
        "model_type": "qwen3",
        "head_dim": config.layer.head_dim,  # or theirs would be 128
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.target_layers,
        "block_size": 1 + (config.num_depths or 4),
        "dflash_config": nested,
        "tie_word_embeddings": False,
    }


def _dflash_tensors(head: Head, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Embedding and output matrix are written though they are the target's."""
    kept = {name: tensor for name, tensor in state.items() if name != "d2t"}
    if head.config.tied:
        kept["lm_head.weight"] = kept["embed_tokens.weight"].clone()
    return kept


def _mlp_config(head: Head) -> dict[str, Any]:
    keys = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "top_k_tokens_per_head", "n_candidates", "tie_weights")
    own = {key: head.config.raw[key] for key in (*keys, "scale_input") if key in head.config.raw}
    return {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], **own}


def _redrafter_config(head: Head) -> dict[str, Any]:
    config = head.config
    sizes = {"hidden_size": config.hidden_size, "exit_dim": config.inner_size or 2 * config.hidden_size}
    own = {"model_type": "recurrent_drafting_drafter", "architectures": ["Drafter"], "vocab_size": config.vocab_size}
    return {**own, **sizes, "num_draft_layers": config.num_blocks, "rnn": True}


def _redrafter_tensors(state: Mapping[str, Tensor], num_blocks: int) -> dict[str, Tensor]:
    """Blocks and output matrix are one sequence there."""
    kept = _only(state, "rnn_", "input_proj.")
    for name, tensor in _only(state, "blocks.").items():
        _, _, layer, part = name.split(".")
        kept[f"lm_head.{layer}.linear.{part}"] = tensor
    kept[f"lm_head.{num_blocks}.weight"] = state["lm_head.weight"]
    return kept


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().clone()


def _layer_ids(head: Head) -> dict[str, Any]:
    taps = head.config.taps
    if taps == default_taps(head.config.kind, head.config.target_layers):
        return {}
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    return {"eagle_aux_hidden_state_layer_ids": list(taps), "eagle_config": nested, "num_aux_hidden_states": len(taps)}


def _medusa_config(head: Head) -> dict[str, Any]:
    """No other key may hold both "num" and "heads" or "layers": vLLM would take it for one of these."""
    config = head.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_depths,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": config.vocab_size,
    }


def _speculators_config(head: Head, raw: Mapping[str, Any], target_name: str) -> dict[str, Any]:
    """The residual is the raw state, which has to be said: the format's own default is the normed one."""
    config, own = head.config, ("draft_vocab_size", "architectures")
    layer = {key: value for key, value in raw.items() if key not in own}
    greedy = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]}
    method = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy], "verifier": verifier}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "speculators_config": method,
    }
