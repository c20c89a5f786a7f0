"""LoRA adapters in PEFT's layout, merged into a copy of the checkpoint they were made for.

    W' = W + s B A,   s = a / r, or a / sqrt(r) with rslora          (Hu et al. 2021, arXiv 2106.09685; rslora: 2312.03732)
    DoRA:  W' = m (W + s B A) / |W + s B A|, row by row               (Liu et al. 2024, arXiv 2402.09353)

The merged folder is an ordinary checkpoint, which every decoder and method can run. Sums are computed in float32.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.checkpoint import write_checkpoint
from outrider.models.weights import SafetensorsFolder

CONFIG_FILE, WEIGHT_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_UNKNOWN = ("alora_invocation_tokens", "layer_replication", "megatron_config", "trainable_token_indices", "arrow_config")
"""Settings that change what is computed and are not supported."""


@final
@dataclass(frozen=True)
class PeftConfig:
    """The parts of ``adapter_config.json`` that affect the merge."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    is_transposed: bool
    """Whether the base stores matrices as [in, out]."""
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    """Alphas of single modules, by the end of their names."""

    def scale(self, module: str) -> float:
        """s of one module."""
        rank, alpha = _of_module(self.ranks, module, self.rank), _of_module(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _of_module(named: Mapping[str, Any], module: str, default: Any) -> Any:
    """Find a module's value as PEFT does: a key is a pattern that matches the module's name, or its end after a dot."""
    key = next((key for key in named if re.match(rf"(.*\.)?({key})$", module)), None)
    return default if key is None else named[key]


def read_peft_config(folder: Path) -> PeftConfig:
    """The settings of an adapter. Settings that cannot be computed exactly are refused."""
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); give a folder written by PEFT's save_pretrained") from None
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type {raw.get('peft_type')!r} is not supported; merge the adapter with PEFT")
    unknown = next((name for name in _UNKNOWN if raw.get(name)), None)
    if unknown is not None:
        raise ModelError(f"{path}: {unknown} is not supported; merge the adapter with PEFT and serve the merged model")
    return PeftConfig(
        rank=raw["r"],
        alpha=raw["lora_alpha"],
        is_rank_stabilised=bool(raw.get("use_rslora")),
        is_transposed=bool(raw.get("fan_in_fan_out")),
        ranks=raw.get("rank_pattern") or {},
        alphas=raw.get("alpha_pattern") or {},
    )


@final
class PeftAdapter:
    """A loaded adapter."""

    def __init__(self, folder: Path) -> None:
        if not (folder / WEIGHT_FILE).is_file():
            raise ModelError(f"{folder} has no {WEIGHT_FILE}; give a folder written by PEFT's save_pretrained")
        self.folder, self.config = folder, read_peft_config(folder)
        self._modules, self._whole = _sorted_tensors(folder)

    @property
    def changed(self) -> list[str]:
        """Names of the tensors of the base that it changes or replaces."""
        return [f"{module}.weight" for module in self._modules] + list(self._whole)

    def apply(self, name: str, base: Tensor) -> Tensor:
        """A tensor of the base with the adapter merged."""
        if name in self._whole:
            return self._whole[name].to(base.dtype)
        module = name.removesuffix(".weight")
        parts = self._modules.get(module)
        return base if parts is None or module == name else self._merged(module, base, parts).to(base.dtype)

    def _merged(self, module: str, base: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        is_embedding = "lora_embedding_A" in parts
        kind = "lora_embedding" if is_embedding else "lora"
        try:
            delta = parts[f"{kind}_B"].float() @ parts[f"{kind}_A"].float() * self.config.scale(module)
        except KeyError as error:
            raise ModelError(
                f"{self.folder}: {module} has no {error}; the file is incomplete: save the adapter again"
            ) from None
        delta = delta.T if is_embedding or self.config.is_transposed else delta
        if delta.shape != base.shape:
            what = f"{self.folder}: {module} is made for a matrix of shape {list(delta.shape)}"
            raise ModelError(f"{what}, and the model's is {list(base.shape)}; use the model that it was trained on")
        merged = base.float() + delta
        magnitude = parts.get("lora_magnitude_vector")
        if magnitude is None:
            return merged
        dim = 0 if self.config.is_transposed else 1
        return merged * magnitude.float().unsqueeze(dim) / merged.norm(dim=dim, keepdim=True)


def _sorted_tensors(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The adapter's matrices by module and part, and the tensors that replace one of the base."""
    from safetensors.torch import load_file

    modules: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for full, tensor in load_file(folder / WEIGHT_FILE).items():
        name = full.removeprefix(_PREFIX)
        part = next((part for part in _PARTS if f".{part}" in name), None)
        if part is None:
            whole[name.replace(".modules_to_save", "").replace(".base_layer", "")] = tensor
        else:
            modules.setdefault(name.partition(f".{part}")[0], {})[part] = tensor
    return modules, whole


def merge_adapter(base: Path, adapter: Path, out: Path) -> None:
    """Write to ``out`` the checkpoint in ``base`` with the adapter merged, and copies of its other files."""
    if not (base / "config.json").is_file():
        raise ModelError(f"{base} is not a folder with config.json, so no adapter can be merged into it; fetch the checkpoint")
    found, source = PeftAdapter(adapter), SafetensorsFolder(base)
    missing = sorted(set(found.changed) - source.names)
    if missing:
        raise ModelError(f"{adapter} changes {missing[0]!r}, which {base} does not have; use the model that it was trained on")
    with torch.inference_mode():
        tensors = {name: found.apply(name, source.read(name)).contiguous() for name in sorted(source.names)}
    beside = [file for file in base.iterdir() if file.is_file() and not file.name.endswith((".safetensors", ".index.json"))]
    write_checkpoint(out, tensors, config=json.loads((base / "config.json").read_text()), beside=beside)
    for file in adapter.glob("*token*.json"):
        shutil.copyfile(file, out / file.name)
