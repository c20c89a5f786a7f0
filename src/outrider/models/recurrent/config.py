"""A model with recurrent layers, described by numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from outrider.cache.replay import ScanShape
from outrider.core.errors import ModelError
from outrider.models.config import ModelConfig, config_of

UNBOUNDED = 1 << 20
"""The context length given for models without positions, which have no limit."""


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    num_chosen: int
    mlp_size: int
    shared_size: int
    rescaled: bool
    """The weights of the chosen experts are scaled to sum 1."""


class MixerNorm(Enum):
    """The place of the norm in a Mamba-2 mixer."""

    NONE = auto()
    BEFORE_GATE = auto()
    AFTER_GATE = auto()


@dataclass(frozen=True)
class Scaled:
    """A constant of the config by which a tensor is multiplied when it is read."""

    name: str
    """The end of the tensor's name, starting with its module."""
    factor: float
    parts: tuple[tuple[int, float], ...] = ()
    """Numbers of rows with their own factors, from the first row on. Empty if all rows have the same factor."""

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor times its constant, in float32 or a wider type."""
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * self.factor
        return torch.cat([part * factor for part, factor in self._parts(tensor)]) if self.parts else tensor

    def _parts(self, tensor: Tensor) -> zip[tuple[Tensor, float]]:
        return zip(tensor.split([rows for rows, _ in self.parts]), [factor for _, factor in self.parts], strict=True)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Sizes and switches of one decoder with recurrent layers."""

    family: str
    vocab_size: int
    hidden_size: int
    max_len: int
    norm_eps: float
    is_attention: tuple[bool, ...]
    """For each layer, whether it has attention. ``scan`` counts the recurrent layers. A layer may be both."""
    scan: ScanShape
    attention: ModelConfig | None = None
    """The attention layers and MLPs, described like a decoder that has only those; None if there are none."""
    experts: tuple[ExpertShape | None, ...] = ()
    """The mixture of experts of each layer, for families that have some."""
    tied_head: bool = False
    wide_residual: bool = False
    """The residual stream is float32 whatever the weights are."""
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    mixer_biases: tuple[bool, bool] = (False, False)
    """Whether the first and the last matrix of recurrent layers have a bias."""
    mixer_norm: MixerNorm = MixerNorm.AFTER_GATE
    """Place of the norm in Mamba-2 mixers."""
    conv_bias: bool = False
    scaled: tuple[Scaled, ...] = ()
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def num_layers(self) -> int:
        return len(self.is_attention)

    @property
    def num_attention_layers(self) -> int:
        return sum(self.is_attention)

    def memory_layer(self, layer: int) -> int:
        """Number of a layer among those of its kind, by which the cache knows it."""
        return self.is_attention[:layer].count(self.is_attention[layer])


HYBRID_SIZES = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""The default sizes of Bamba and of Falcon-H1 in transformers."""


class RecurrentConfigKeys:
    """The entries of a ``config.json`` with a family's defaults, checked as they are read."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = {**defaults, **{key: value for key, value in raw.items() if value is not None}}

    def whole(self, key: str) -> int:
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"config.json has {key} = {value!r}; it must be a positive whole number: fetch the file again")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.raw.get(key, False))

    def divided(self, whole: str, size: int, parts: str) -> int:
        """``size`` divided by the key's value, which must divide it evenly."""
        if size % self.whole(parts):
            reason = f"{whole} = {size} cannot be divided by {parts} = {self.whole(parts)}"
            raise ModelError(f"config.json is inconsistent: {reason}; fetch the file again")
        return size // self.whole(parts)

    def mamba(self, num_layers: int, name: str, inner: int) -> ScanShape:
        """The scan of Mamba-2 layers of a hybrid model; ``inner`` channels in all, as the file says under ``name``."""
        num_heads, num_groups = self.whole("mamba_n_heads"), self.whole("mamba_n_groups")
        self.divided("mamba_n_heads", num_heads, "mamba_n_groups")
        return ScanShape(
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=self.divided(name, inner, "mamba_n_heads"),
            num_groups=num_groups,
            state_size=self.whole("mamba_d_state"),
            conv_len=self.whole("mamba_d_conv"),
            conv_size=inner + 2 * num_groups * self.whole("mamba_d_state"),
        )

    @property
    def silu(self) -> bool:
        """Whether the activation is SiLU, the only one that the scan supports."""
        return self.raw.get("hidden_act", "silu") in ("silu", "swish")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        value = self.raw.get("eos_token_id")
        return () if value is None else (value,) if isinstance(value, int) else tuple(value)

    @property
    def dtype(self) -> str | None:
        return self.raw.get("dtype") or self.raw.get("torch_dtype")

    @property
    def time_step_limit(self) -> tuple[float, float]:
        """Bounds of a time step. Files write infinity in several ways."""
        low, high = self.raw.get("time_step_limit") or (0.0, float("inf"))
        return _number(low), _number(high)

    def attention(self, model_type: str, partial_rotary: float) -> ModelConfig:
        """The attention layers, as ``model_type`` would have them."""
        rope = dict(self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {})
        rope["partial_rotary_factor"] = partial_rotary
        config = config_of({**self.raw, "model_type": model_type, "rope_parameters": rope, "layer_types": None})
        if config is None:
            kind = rope.get("rope_type") or rope.get("type")
            raise ModelError(f"config.json asks for rotary scaling {kind!r}, which is not known; fetch the file again")
        return config

    def of_attention(self, attention: ModelConfig, is_attention: tuple[bool, ...]) -> dict[str, Any]:
        """The fields of a ``RecurrentConfig`` that follow from the attention layers and the file, for a family with
        attention."""
        return {
            "vocab_size": attention.vocab_size,
            "hidden_size": attention.hidden_size,
            "max_len": attention.max_len,
            "norm_eps": attention.norm_eps,
            "is_attention": is_attention,
            "attention": attention,
            "tied_head": attention.tied_head,
            "eos_ids": self.eos_ids,
            "dtype": self.dtype,
        }


def _number(value: Any) -> float:
    """A bound, which may be written as a number, a word, or an object that holds one."""
    return float(next(iter(value.values()))) if isinstance(value, Mapping) else float(value)
