"""A decoder described by numbers alone, read from a Hugging Face ``config.json``.

``ModelConfig`` says everything the lean decoder has to know, whatever the family: two families that differ only in numbers
run the same code. ``config_of`` reads both the old spelling (``rope_theta`` beside ``rope_scaling``) and that of
transformers 5 (``rope_parameters``); it returns None where the architecture needs the Hugging Face adapter instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import ModelError
from outrider.models.rope import ROPE_KINDS, Rope

Raw = Mapping[str, Any]
"""A parsed config.json."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
"""Names of the gate's activation in config files -> ours."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_len: int
    """Longest context the model is opened for."""
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weights of every norm: 1 where a checkpoint stores w of (1 + w)."""
    qk_norm: bool = False
    """Queries and keys are normalised per head before they are rotated."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int | None, ...]
    """Index into ``ropes`` for each layer; None for a layer without positions."""
    windows: tuple[int | None, ...]
    """Most positions a node of each layer sees, itself included; None for all."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    query_scale: float
    embedding_scale: float = 1.0
    post_norms: bool = False
    """Attention and MLP outputs are normalised before they are added to the residual stream."""
    tied_head: bool = False
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None
    """Type of the stored weights, by name, where the file says so."""


def config_of(raw: Raw) -> ModelConfig | None:
    """The lean decoder's description of a checkpoint; None if it has to go through the Hugging Face adapter."""
    try:
        config = _lean_config(raw)
    except ModelError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(f"config.json cannot be understood ({type(error).__name__}: {error}); fetch the file again") from error
    if config is not None:
        _check(config)
    return config


def _lean_config(raw: Raw) -> ModelConfig | None:
    inner = raw.get("text_config") if raw.get("model_type") == "gemma3" else None
    text: Raw = raw if inner is None else {**inner, **{key: raw[key] for key in _OUTER_KEYS if key in raw}}
    family = "gemma3_text" if inner is not None else str(text.get("model_type"))
    if family not in _FAMILIES or text.get("quantization_config") or text.get("use_bidirectional_attention"):
        return None
    read = _Reader({**_DEFAULTS, **_FAMILIES[family], **text, "model_type": family})
    if read.activation not in ACTIVATIONS or any(rope.kind not in ROPE_KINDS for rope in read.ropes):
        return None
    return read.config(family)


def _check(config: ModelConfig) -> None:
    """What no default can repair."""
    if config.num_heads % config.num_kv_heads:
        heads = f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads"
        raise ModelError(f"config.json is inconsistent: {heads}; fetch the file again")
    if not len(config.windows) == len(config.rope_of_layer) == config.num_layers:
        raise ModelError(
            f"config.json is inconsistent: its lists are not {config.num_layers} layers long; fetch the file again"
        )
    for rope in config.ropes:
        if rope.kind == "longrope" and not len(rope.short_factor) == len(rope.long_factor) == rope.dim // 2:
            raise ModelError(f"config.json is inconsistent: longrope needs {rope.dim // 2} factors; fetch the file again")
        if rope.kind in ("linear", "dynamic", "llama3") and rope.factor is None:
            raise ModelError(f"config.json is inconsistent: {rope.kind} rope scaling without a factor; fetch the file again")


_OUTER_KEYS = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""What a multimodal config says beside its ``text_config``."""


class _Reader:
    """A config file with its family's defaults filled in."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.family = str(raw["model_type"])
        self.is_gemma = self.family.startswith("gemma")
        self.num_layers = self.whole("num_hidden_layers")
        self.head_dim = int(raw.get("head_dim") or self.whole("hidden_size") // self.whole("num_attention_heads"))
        self.activation = str(raw.get("hidden_activation") or raw["hidden_act"])
        self.trained_len = self.whole("max_position_embeddings")
        self.layer_types = self._layer_types()
        self.ropes, self.rope_of_layer = self._ropes()

    def whole(self, key: str) -> int:
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"config.json has {key} = {value!r}; it must be a positive whole number: fetch the file again")
        return value

    def config(self, family: str) -> ModelConfig:
        raw = self.raw
        num_heads = self.whole("num_attention_heads")
        hidden_size = self.whole("hidden_size")
        attention_bias = bool(raw["attention_bias"])
        scale = raw.get("query_pre_attn_scalar") if self.is_gemma else self.head_dim
        return ModelConfig(
            family=family,
            vocab_size=self.whole("vocab_size"),
            hidden_size=hidden_size,
            num_layers=self.num_layers,
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=self.head_dim,
            mlp_size=self.whole("intermediate_size"),
            max_len=min(rope.natural_len for rope in self.ropes),
            norm_eps=float(raw["rms_norm_eps"]),
            norm_offset=1.0 if self.is_gemma else 0.0,
            qk_norm=family in ("qwen3", "gemma3_text"),
            qkv_bias=attention_bias or family == "qwen2",
            out_bias=attention_bias,
            mlp_bias=bool(raw["mlp_bias"]),
            activation=ACTIVATIONS[self.activation],
            ropes=self.ropes,
            rope_of_layer=self.rope_of_layer,
            windows=self._windows(),
            attention_softcap=raw.get("attn_logit_softcapping"),
            final_softcap=raw.get("final_logit_softcapping"),
            query_scale=float(scale or self.head_dim) ** -0.5,
            embedding_scale=hidden_size**0.5 if self.is_gemma else 1.0,
            post_norms=family in ("gemma2", "gemma3_text"),
            tied_head=bool(raw["tie_word_embeddings"]),
            eos_ids=_ids(raw.get("eos_token_id")),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
        )

    def _layer_types(self) -> list[str]:
        given = self.raw.get("layer_types")
        if given is not None:
            return [str(kind) for kind in given]
        rule = _WINDOW_RULES.get(self.family, _no_window)
        return [_SLIDING if rule(self.raw, layer) else _FULL for layer in range(self.num_layers)]

    def _windows(self) -> tuple[int | None, ...]:
        size = self.raw.get("sliding_window")
        if not size or self.raw.get("use_sliding_window") is False:
            return (None,) * self.num_layers
        return tuple(int(size) if kind == _SLIDING else None for kind in self.layer_types)

    def _ropes(self) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
        given = dict(self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {})
        if self.family != "gemma3_text":
            without = self._layers_without_rope()
            return (self._rope(given),), tuple(None if layer in without else 0 for layer in range(self.num_layers))
        nested = _FULL in given or _SLIDING in given
        full = dict((given.get(_FULL) if nested else given) or {})
        local = dict((given.get(_SLIDING) if nested else None) or {})
        full.setdefault("rope_theta", self.raw.get("rope_theta", 1_000_000.0))
        local.setdefault("rope_theta", self.raw.get("rope_local_base_freq", 10_000.0))
        order = tuple(1 if kind == _SLIDING else 0 for kind in self.layer_types)
        return (self._rope(full), self._rope(local)), order

    def _rope(self, given: Raw) -> Rope:
        kind = str(given.get("rope_type") or given.get("type") or "default")
        if self.family == "phi3" and kind in ("su", "yarn"):
            kind = "longrope"  # names of the same thing in early Phi-3 files
        partial = given.get("partial_rotary_factor") or self.raw.get("partial_rotary_factor") or 1.0
        theta = given.get("rope_theta") or self.raw.get("rope_theta") or 10_000.0
        outer = self.raw.get("original_max_position_embeddings")
        original = outer or given.get("original_max_position_embeddings") or self.trained_len
        numbers = {key: given[key] for key in _ROPE_KEYS if given.get(key) is not None}
        return Rope(
            kind=kind,
            theta=float(theta),
            dim=int(self.head_dim * partial),
            trained_len=self.trained_len,
            original_len=int(original),
            short_factor=tuple(given.get("short_factor") or ()),
            long_factor=tuple(given.get("long_factor") or ()),
            **numbers,
        )

    def _layers_without_rope(self) -> set[int]:
        if self.family != "smollm3":
            return set()
        every = int(self.raw["no_rope_layer_interval"])
        flags = self.raw.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(self.num_layers)]
        return {layer for layer, has_rope in enumerate(flags) if not has_rope}


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _no_window(raw: Raw, layer: int) -> bool:
    del raw, layer
    return False


_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_KEYS = (
    "factor attention_factor low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate".split()
)
_WINDOW_RULES: dict[str, Callable[[Raw, int], bool]] = {
    "mistral": lambda raw, layer: True,  # noqa: ARG005 - one signature for all rules
    "phi3": lambda raw, layer: True,  # noqa: ARG005
    "qwen2": lambda raw, layer: layer >= raw["max_window_layers"],
    "qwen3": lambda raw, layer: layer >= raw["max_window_layers"],
    "smollm3": lambda raw, layer: not (raw.get("no_rope_layers") or _every(raw))[layer],
    "gemma2": lambda raw, layer: (layer + 1) % 2 != 0,  # noqa: ARG005
    "gemma3_text": lambda raw, layer: (layer + 1) % int(raw["sliding_window_pattern"]) != 0,
}
"""Which layers have the sliding window when the file does not list ``layer_types``."""


def _every(raw: Raw) -> list[int]:
    return [int((layer + 1) % raw["no_rope_layer_interval"] != 0) for layer in range(raw["num_hidden_layers"])]


_DEFAULTS: Raw = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_GEMMA: Raw = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
_QWEN: Raw = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_FAMILIES: dict[str, Raw] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "smollm3": {
        "max_position_embeddings": 32768,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000},
    "gemma": {**_GEMMA, "max_position_embeddings": 8192, "sliding_window": None, "query_pre_attn_scalar": None},
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
}
"""What each family's files may leave out, because transformers fills it in."""
