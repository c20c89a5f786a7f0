"""Folders of trained heads: made for a target, written, read, and checked against the target they are used with.

A folder is complete. It holds copies of the tensors that the heads share with the target (embedding, final norm, output
matrix), so that it works with any engine that runs the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.core.interfaces import Target
from outrider.models.checkpoint import write_checkpoint
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.embedding_and_output import EmbeddingAndOutput, read_target
from outrider.models.heads.head import Head
from outrider.models.heads.kinds import KINDS
from outrider.models.heads.reading import TARGET_FOLDER_KEYS, head_config, target_folder_of
from outrider.models.load import read_config
from outrider.models.weights import SafetensorsFolder

_SKIPPED = frozenset({"t2d"})
_CLOSE = 0.98
"""Stored signature and target are different models below this cosine."""


def new_head(config: HeadConfig, ends: EmbeddingAndOutput, *, ids: Tensor | None = None, seed: int = 0) -> Head:
    """Untrained heads for a target. ``ids`` are the target's tokens they can produce, ascending (default: all)."""
    torch.manual_seed(seed)
    head = module_of(config)
    ids = torch.arange(config.vocab_size) if ids is None else ids
    if len(ids) != config.draft_vocab_size:
        raise ModelError(f"{len(ids)} tokens were given for a draft vocabulary of {config.draft_vocab_size}; give as many")
    with torch.no_grad():
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.adopt(ends, ids)
    head.freeze()
    return head


def module_of(config: HeadConfig) -> Head:
    """Heads for a config, with initial weights."""
    return KINDS[config.kind].module(config)


def new_config(kind: str, target: Mapping[str, Any], **changes: Any) -> HeadConfig:
    """The config of heads for the target with this ``config.json``. ``changes`` may override ``SHAPES`` and any key of
    the format."""
    layers = int(target["num_hidden_layers"])
    keys = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps hidden_act".split()
    keys += "rope_theta rope_scaling rope_parameters max_position_embeddings vocab_size bos_token_id eos_token_id".split()
    keys += ["image_token_id"]
    raw: dict[str, Any] = {key: target[key] for key in keys if key in target}
    ours = {"kind": kind, "target_layers": layers, "tied": bool(target.get("tie_word_embeddings", False))}
    ours["taps"] = list(changes.pop("taps", None) or KINDS[kind].default_taps(layers))
    for name in ("num_blocks", "own_readouts", "prefix", "stride", "num_layers"):
        if name in changes:
            ours[name] = changes.pop(name)
    raw |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "attention_bias": False, "outrider": ours, **changes}
    raw["draft_vocab_size"] = raw.get("draft_vocab_size") or raw["vocab_size"]
    raw |= KINDS[kind].new_keys(raw)
    return head_config(raw, origin=f"new {kind} heads")


SHAPES = (
    "num_heads", "num_blocks", "own_readouts", "prefix", "intermediate_size", "draft_vocab_size", "taps", "stride",
    "num_layers", "inner_dim", "exit_dim", "tie_weights", "scale_input", "mask_token_id", "markov_rank",
    "markov_head_type", "draft_window", "max_offset", "block_len", "num_visual_queries", "visual_experts",
    "visual_ratio",
)  # fmt: skip
"""Keys with which ``new_config`` changes the shape of heads."""


def signature_of(target: Target, hidden_size: int) -> tuple[float, ...]:
    """The target's logits of sixteen tokens at a fixed state, scaled to length 1."""
    state = torch.cos(torch.arange(hidden_size, dtype=torch.float32) * 0.7).to(target.device, target.dtype)
    with torch.inference_mode():
        logits = target.logits(state[None, None])[0, 0].float().cpu()
    chosen = logits[torch.linspace(0, target.vocab_size - 1, 16).long()]
    chosen = chosen - chosen.mean()
    return tuple(round(value, 5) for value in (chosen / chosen.norm().clamp(min=1e-6)).tolist())


def check_target(config: HeadConfig, target: Target, *, origin: str) -> None:
    """Refuse heads that were made for another target."""
    facts = {"layers": (config.target_layers, target.num_layers), "tokens": (config.vocab_size, target.vocab_size)}
    for name, (theirs, ours) in facts.items():
        if theirs != ours:
            raise ModelError(
                f"{origin}: these heads were made for a target with {theirs} {name} and this one has {ours}; "
                "use the target they were trained for, or train heads for this one: outrider train"
            )
    if config.signature:
        mine = torch.tensor(signature_of(target, config.hidden_size))
        if float(mine @ torch.tensor(config.signature)) < _CLOSE:
            raise ModelError(
                f"{origin}: these heads were made for another target of the same shape (its output matrix differs); "
                "use the target they were trained for, or train heads for this one: outrider train"
            )


def save_head(
    head: Head,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
    target_folder: str | None = None,
) -> None:
    """Write a folder, complete or not at all.

    ``target_folder`` is a path relative to this folder. Tensors that are the target's are then left out."""
    left_out = head.frozen if target_folder else ()
    state = {name: _stored(tensor, dtype) for name, tensor in head.state_dict().items() if name not in left_out}
    if head.config.draft_vocab_size != head.config.vocab_size:
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        known[head.target_ids.cpu()] = True
        state["t2d"] = known
    raw = {**head.config.raw, "dtype": str(dtype).removeprefix("torch.")}
    own = {key: value for key, value in raw.get("outrider", {}).items() if key not in TARGET_FOLDER_KEYS or not target_folder}
    raw["outrider"] = {**own, "signature": list(head.config.signature)}
    if target_folder:
        raw["outrider"]["target_folder"] = target_folder
    write_checkpoint(folder, state, config=raw, notes=notes)


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous().clone()


def load_head(
    folder: str | Path,
    target: Target | None = None,
    *,
    dtype: torch.dtype | None = None,
    ends: EmbeddingAndOutput | str | None = None,
) -> Head:
    """The heads in a folder, on the target's device, checked against the target. ``ends``, or the target's folder,
    supplies the tensors that a public checkpoint leaves to the target."""
    folder = Path(folder)
    num_layers = 0 if target is None else target.num_layers
    config = head_config(read_config(folder), origin=str(folder), num_layers=num_layers)
    if target is not None:
        check_target(config, target, origin=str(folder))
    shared = target_folder_of(config.raw)
    ends = str((folder / shared).resolve()) if shared else ends
    source = SafetensorsFolder(folder)
    head, kind = module_of(config), KINDS[config.kind]
    renamed = kind.tensor_names(source.names)
    state = {ours: source.read(theirs) for ours, theirs in renamed.items() if ours not in _SKIPPED}
    wanted = head.state_dict()
    state = kind.spread(state, wanted, config)
    if "d2t" not in state:
        state["d2t"] = wanted["d2t"]
    if ends is not None and not set(wanted) <= set(state):
        ids = state["d2t"] + torch.arange(len(state["d2t"]))
        state = {**_from_ends(wanted, read_target(ends)[1] if isinstance(ends, str) else ends, ids), **state}
    _check_tensors(state, wanted, folder)
    head.load_state_dict(state)
    head.requires_grad_(False)
    device = torch.device("cpu") if target is None else target.device
    return head.to(device, dtype or (torch.float32 if target is None or device.type == "cpu" else target.dtype)).eval()


def _from_ends(wanted: Mapping[str, Tensor], ends: EmbeddingAndOutput, ids: Tensor) -> dict[str, Tensor]:
    """The target's own tensors. Of its output matrix, only the rows of the tokens ``ids``."""
    readout = ends.readout if len(ids) == len(ends.readout) else ends.readout[ids]
    found = {"embed_tokens.weight": ends.embedding, "target_norm.weight": ends.norm, "lm_head.weight": readout}
    return {name: tensor for name, tensor in found.items() if name in wanted and wanted[name].shape == tensor.shape}


def _check_tensors(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path) -> None:
    missing = sorted(set(wanted) - set(state))
    if missing:
        raise ModelError(
            f"{folder}: tensor {missing[0]!r} is missing ({len(missing)} in all); ask `outrider inspect` whether the "
            "target has them, or fetch the heads again"
        )
    unknown = sorted(set(state) - set(wanted))
    if unknown:
        raise ModelError(
            f"{folder}: tensor {unknown[0]!r} does not belong to heads of this kind; fetch config.json and weights again"
        )
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise ModelError(
                f"{folder}: tensor {name!r} has shape {list(tensor.shape)} and config.json asks for {list(wanted[name].shape)}"
                "; fetch both again, from one place"
            )
