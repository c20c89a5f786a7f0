"""Describes a folder of heads: its kind, the engines that run it, and mistakes that no engine reports.

A head with a wrong layer, a missing norm or a shifted vocabulary still drafts, but its guesses are never accepted. So the
folder is compared with its format, tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.models.heads.config import HeadConfig
from outrider.models.heads.folder import module_of
from outrider.models.heads.kinds import KINDS
from outrider.models.heads.reading import head_config, target_folder_of
from outrider.models.load import read_config
from outrider.models.weights import SafetensorsFolder


@dataclass(frozen=True)
class Report:
    """Facts by name, and problems in words."""

    facts: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inspect_folder(folder: Path) -> Report:
    """Read a folder without a target."""
    raw = read_config(folder)
    config = head_config(raw, origin=str(folder))
    source = SafetensorsFolder(folder)
    kind = KINDS[config.kind]
    tensors = {ours: source.read(theirs) for ours, theirs in kind.tensor_names(source.names).items()}
    report = Report(_facts(config, tensors))
    tensors = kind.spread(tensors, module_of(config).state_dict(), config)
    _check_shapes(config, raw, tensors, report)
    _check_vocabulary(config, tensors, report)
    _check_layers(config, raw, report)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            report.problems.append(f"{name} holds values that are no numbers: it was never loaded or training diverged")
    return report


def _facts(config: HeadConfig, tensors: dict[str, Tensor]) -> dict[str, Any]:
    layer = config.layer
    return {
        "kind": config.kind,
        "parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        "hidden_size": config.hidden_size,
        "vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} tokens",
        "depths": config.num_depths or "any",
        "reads": f"states entering layers {list(config.taps)} of {config.target_layers} (the last number: after all)",
        "layer": None if layer is None else f"{layer.num_heads} heads of {layer.head_dim}, MLP {layer.mlp_size}",
        "rope_theta": None if layer is None else layer.ropes[0].theta,
        "served by": KINDS[config.kind].served_by,
    }


def _check_shapes(config: HeadConfig, raw: dict[str, Any], tensors: dict[str, Tensor], report: Report) -> None:
    module = module_of(config)
    wanted = module.state_dict()
    shared = bool(target_folder_of(raw))
    for name, tensor in wanted.items():
        if name in tensors:
            if tensors[name].shape != tensor.shape:
                report.problems.append(
                    f"{name} has shape {list(tensors[name].shape)}, config.json asks for {list(tensor.shape)}"
                )
        elif name in module.frozen:
            where = "the target's folder" if shared else "the target; option ends names its folder"
            report.notes.append(f"{name} is left to {where}")
        elif name != "d2t":
            report.problems.append(f"{name} is missing")
    for name in sorted(set(tensors) - set(wanted) - {"t2d"}):
        report.problems.append(f"{name} belongs to no {config.kind} heads; an engine would ignore it silently")


def _check_vocabulary(config: HeadConfig, tensors: dict[str, Tensor], report: Report) -> None:
    offsets = tensors.get("d2t")
    small = config.draft_vocab_size < config.vocab_size
    if offsets is None:
        if small:
            report.problems.append("d2t is missing though the vocabulary is reduced: guesses would name other tokens")
        return
    if len(offsets) != config.draft_vocab_size:
        return
    ids = offsets + torch.arange(len(offsets))
    if small and not bool(offsets.any()):
        report.notes.append("d2t is all zero: the draft speaks the first tokens of the vocabulary, which is rarely meant")
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        report.problems.append("d2t leads outside the target's vocabulary; it must hold offsets (target = i + d2t[i]), not ids")
    elif len(ids.unique()) != len(ids):
        report.problems.append("d2t names a token twice; it must hold offsets (target = i + d2t[i]), not ids")
    known = tensors.get("t2d")
    fits = known is not None and int(ids.min()) >= 0 and int(ids.max()) < len(known)
    if known is not None and fits and not (bool(known[ids].all()) and int(known.sum()) == len(ids.unique())):
        report.problems.append("t2d and d2t disagree about which tokens the draft can say")


def _check_layers(config: HeadConfig, raw: dict[str, Any], report: Report) -> None:
    kind = KINDS[config.kind]
    if kind.num_taps > 1 and config.taps and config.taps != kind.default_taps(config.target_layers):
        report.notes.append("layers are not the default ones: engines count them differently, export writes both spellings")
    if raw.get("norm_before_residual", "speculators_model_type" in raw):
        report.problems.append("norm_before_residual is on: the residual is the normed state, which is not supported here")
    report.problems.extend(kind.problems(raw))
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if raw.get(key):
            report.problems.append(f"{key} is on, which is not supported here: acceptance would be poor without an error")
