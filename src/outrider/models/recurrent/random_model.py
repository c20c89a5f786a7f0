"""Small models with recurrent layers and random weights: for tests, examples and benchmarks that need no trained model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.core.errors import OptionError, nearest
from outrider.models.checkpoint import write_checkpoint
from outrider.models.recurrent.config import RecurrentConfig
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.families import FAMILIES, recurrent_config
from outrider.models.weights import TensorSource

_MAMBA = {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "num_hidden_layers": 2}
_BAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "attn_layer_indices": [1], "num_hidden_layers": 3}
_FALCON = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "num_hidden_layers": 2}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
_QWEN = {"num_hidden_layers": 2, "full_attention_interval": 2, "mlp_only_layers": [1], "head_dim": 16}
_HYBRID = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
_SHAPES: dict[str, dict[str, Any]] = {
    "mamba2": _MAMBA,
    "bamba": {**_HYBRID, **_BAMBA},
    "falcon_h1": {**_HYBRID, **_FALCON},
    "qwen3_next": {**_HYBRID, **_DELTA, **_EXPERTS, **_QWEN},
}


def tiny_raw(family: str, **changes: Any) -> dict[str, Any]:
    """A small ``config.json`` of a family; ``changes`` are keys of it."""
    if family not in FAMILIES:
        raise OptionError(f"unknown family {family!r}; {nearest(family, list(FAMILIES))}")
    return {"model_type": family, "vocab_size": 64, "hidden_size": 32, "eos_token_id": 2, **_SHAPES[family], **changes}


def random_recurrent(
    raw: Mapping[str, Any],
    *,
    seed: int = 0,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    fast: bool = True,
) -> RecurrentDecoder:
    """A model of this ``config.json``. ``noise`` mixes in a second set of weights: the more, the worse a draft it is for the
    model without."""
    return RecurrentDecoder(_config(raw), RandomTensors(seed, noise), dtype=dtype, device=device, fast=fast)


def write_random(folder: Path, raw: Mapping[str, Any], *, seed: int = 0, noise: float = 0.0) -> None:
    """Write a model as a folder in the layout of its family."""
    source = RandomTensors(seed, noise)
    RecurrentDecoder(_config(raw), source, dtype=torch.float32, fast=False)
    write_checkpoint(folder, source.made, config=raw)


def _config(raw: Mapping[str, Any]) -> RecurrentConfig:
    config = recurrent_config(raw)
    if config is None:
        name = str(raw.get("model_type"))
        raise OptionError(f"model_type = {name!r} with these keys is unknown; {nearest(name, FAMILIES)}")
    return config


@final
class RandomTensors(TensorSource):
    """A checkpoint that has every tensor it is asked for. A tensor depends on its name and the seed alone."""

    origin = "random weights"

    def __init__(self, seed: int = 0, noise: float = 0.0) -> None:
        self._seed, self._noise = seed, noise
        self.made: dict[str, Tensor] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.made)

    def read(self, name: str) -> Tensor:
        return self.made[name]

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self.made:
            normal = self._normal(name, self._seed, shape)
            if self._noise:
                normal = (normal + self._noise * self._normal(name, self._seed + 1, shape)) / (1 + self._noise**2) ** 0.5
            self.made[name] = _scaled(name, normal)
        return self.made[name]

    def _normal(self, name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
        number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
        return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _scaled(name: str, normal: Tensor) -> Tensor:
    """Sizes as in trained models: states that last, activations near 1, clear preferences at the end."""
    if name.endswith("A_log"):
        return normal - 1.0
    if name.endswith("dt_bias"):
        return normal - 2.0
    if normal.dim() == 1:
        return 0.1 * normal + (0.0 if name.endswith("bias") else 1.0)
    if "embed" in name:
        return normal
    return normal * (4.0 if name.startswith("lm_head") else 1.5) / normal.shape[-1] ** 0.5
