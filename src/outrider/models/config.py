"""Reads a Hugging Face ``config.json`` into a ``ModelConfig``: a decoder described by numbers alone.

``ModelConfig`` (``features.py``) says everything the lean decoder has to know, whatever the family: two families that differ
only in numbers run the same code. ``config_of`` reads both the old spelling (``rope_theta`` beside ``rope_scaling``) and that
of transformers 5 (``rope_parameters``); it returns None where the architecture needs the Hugging Face adapter instead.
"""

from __future__ import annotations

from typing import Any

from outrider.core.errors import ModelError
from outrider.models.config_parts import experts_of, latent_of
from outrider.models.families import DEFAULTS, FULL, SLIDING, TRAITS, WINDOW_RULES, Raw, without_rope
from outrider.models.features import Experts, ModelConfig
from outrider.models.quantised.formats import unknown_method
from outrider.models.rope import ROPE_KINDS, Rope, score_factor

__all__ = ["ACTIVATIONS", "Experts", "ModelConfig", "Raw", "config_of", "why_not_lean"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
"""Names of the gate's activation in config files -> ours."""


def config_of(raw: Raw) -> ModelConfig | None:
    """The lean decoder's description of a checkpoint; None if it has to go through the Hugging Face adapter."""
    try:
        config = _lean_config(raw)
    except ModelError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(f"config.json cannot be read ({type(error).__name__}: {error}); fetch the file again") from error
    if config is not None:
        _check(config)
    return config


def why_not_lean(raw: Raw) -> str | None:
    """Why ``config_of`` returns None, in words; None if it does not."""
    text = _text_config(raw)
    family = str(text.get("model_type"))
    if family not in DEFAULTS:
        return f"model_type {family!r} is not among the lean decoder's families"
    unknown = unknown_method(text)
    if unknown is not None:
        return unknown
    if text.get("use_bidirectional_attention"):
        return "its attention looks ahead"
    read = _Reader({**DEFAULTS[family], **text})
    if read.activation not in ACTIVATIONS:
        return f"activation {read.activation!r} is not among {', '.join(ACTIVATIONS)}"
    kinds = [rope.kind for rope in read.ropes if rope.kind not in ROPE_KINDS]
    if kinds:
        return f"rotary scaling {kinds[0]!r} is not among {', '.join(ROPE_KINDS)}"
    others = set(read.layer_types) - {FULL, SLIDING}
    if others:
        return f"layers of type {min(others)!r} are not among {FULL}, {SLIDING}"
    if family == "olmoe" and text.get("clip_qkv") is not None:
        return "queries, keys and values are clipped (clip_qkv)"
    gate = (text.get("swiglu_alpha", _ALPHA), text.get("swiglu_limit", _LIMIT))
    if family == "gpt_oss" and gate != (_ALPHA, _LIMIT):
        return f"the gate of its experts is not that of alpha {_ALPHA} and limit {_LIMIT}"
    if read.own("n_shared_experts") and text.get("mlp_bias"):
        return "its MLPs have biases beside experts (mlp_bias)"
    if family == "deepseek_v2" and read.raw["topk_method"] not in ("greedy", "group_limited_greedy"):
        return f"its router chooses by {read.raw['topk_method']!r} (topk_method)"
    return None


_ALPHA, _LIMIT = 1.702, 7.0
"""The clamped gate of gpt-oss."""


def _text_config(raw: Raw) -> Raw:
    """The part of a config that describes the decoder, and its family."""
    inner = raw.get("text_config") if raw.get("model_type") == "gemma3" else None
    if inner is None:
        return raw
    return {**inner, **{key: raw[key] for key in _OUTER_KEYS if key in raw}, "model_type": "gemma3_text"}


def _lean_config(raw: Raw) -> ModelConfig | None:
    if why_not_lean(raw) is not None:
        return None
    text = _text_config(raw)
    return _Reader({**DEFAULTS[str(text["model_type"])], **text}).config()


def _check(config: ModelConfig) -> None:
    """Refuse values that no default can replace."""
    if config.num_heads % config.num_kv_heads:
        heads = f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads"
        raise ModelError(f"config.json is inconsistent: {heads}; fetch the file again")
    if not len(config.windows) == len(config.rope_of_layer) == config.num_layers:
        raise ModelError(
            f"config.json is inconsistent: its lists are not {config.num_layers} layers long; fetch the file again"
        )
    experts = config.experts
    if experts is not None and (not 0 < experts.num_chosen <= experts.count or experts.count % experts.groups):
        few = f"{experts.num_chosen} experts a token of {experts.count} in {experts.groups} groups"
        raise ModelError(f"config.json is inconsistent: {few}; fetch the file again")
    for rope in config.ropes:
        if rope.kind == "longrope" and not len(rope.short_factor) == len(rope.long_factor) == rope.dim // 2:
            raise ModelError(f"config.json is inconsistent: longrope needs {rope.dim // 2} factors; fetch the file again")
        if rope.kind in ("linear", "dynamic", "llama3") and rope.factor is None:
            raise ModelError(f"config.json is inconsistent: {rope.kind} rope scaling without a factor; fetch the file again")


_OUTER_KEYS = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys of a multimodal config outside its ``text_config``."""


class _Reader:
    """A config file with its family's defaults filled in."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.family = str(raw["model_type"])
        self.is_gemma = self.family.startswith("gemma")
        self.num_layers = self.whole("num_hidden_layers")
        self.latent = latent_of(self)
        if self.latent is None:
            self.head_dim = int(raw.get("head_dim") or self.whole("hidden_size") // self.whole("num_attention_heads"))
        else:
            self.head_dim = self.latent.rank + self.latent.rope_dim
        self.activation = str(raw.get("hidden_activation") or raw["hidden_act"])
        if self.family == "gemma" and self.activation == "gelu":
            self.activation = "gelu_pytorch_tanh"  # what the first Gemma's files mean by it
        self.trained_len = self.whole("max_position_embeddings")
        self.layer_types = self._layer_types()
        self.ropes, self.rope_of_layer = self._ropes()

    def whole(self, key: str) -> int:
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"config.json has {key} = {value!r}; it must be a positive whole number: fetch the file again")
        return value

    def own(self, key: str) -> Any:
        """The value of a key, if this family uses it; otherwise None, even if the file has it."""
        return self.raw.get(key) if key in DEFAULTS[self.family] else None

    def config(self) -> ModelConfig:
        raw = self.raw
        num_heads = self.whole("num_attention_heads")
        sizes: dict[str, Any] = {
            "family": self.family,
            "vocab_size": self.whole("vocab_size"),
            "hidden_size": self.whole("hidden_size"),
            "num_layers": self.num_layers,
            "num_heads": num_heads,
            "num_kv_heads": self._num_kv_heads(num_heads),
            "head_dim": self.head_dim,
            "mlp_size": self.whole("intermediate_size"),
            "max_len": min(rope.natural_len for rope in self.ropes),
            "activation": ACTIVATIONS[self.activation],
            "ropes": self.ropes,
            "rope_of_layer": self.rope_of_layer,
            "windows": self._windows(),
            "latent": self.latent,
            "experts": experts_of(self),
            "tied_head": bool(raw["tie_word_embeddings"]),
            "eos_ids": _ids(raw.get("eos_token_id")),
            "dtype": raw.get("dtype") or raw.get("torch_dtype"),
        }
        return ModelConfig(**{**sizes, **self._switches(), **self._numbers(), **TRAITS.get(self.family, {})})

    def _switches(self) -> dict[str, Any]:
        raw = self.raw
        attention_bias = bool(raw["attention_bias"])
        use_bias, parallel = bool(self.own("use_bias")), bool(self.own("use_parallel_residual"))
        return {
            "qkv_bias": attention_bias or use_bias or bool(self.own("use_qkv_bias")),
            "out_bias": attention_bias or use_bias,
            "mlp_bias": bool(raw["mlp_bias"]) or use_bias,
            "qk_norm": bool(self.own("use_qk_norm") or self.own("qk_layernorm")),
            "parallel": parallel,
            "one_norm": parallel and self.family == "stablelm",
            "interleaved_rope": bool(self.own("rope_interleave")),
        }

    def _num_kv_heads(self, num_heads: int) -> int:
        if self.latent is not None:
            return 1
        return int((self.family != "gpt_neox" and self.raw.get("num_key_value_heads")) or num_heads)

    def _numbers(self) -> dict[str, Any]:
        raw = self.raw
        size = self.head_dim if self.latent is None else self.latent.query_dim
        scale = float((self.is_gemma and raw.get("query_pre_attn_scalar")) or size) ** -0.5
        if self.latent is not None:
            scale *= score_factor(self.ropes[0])
        eps = self.own("layer_norm_eps") or self.own("norm_epsilon") or raw["rms_norm_eps"]
        hidden = self.whole("hidden_size")
        root = hidden**0.5 if self.is_gemma else 1.0
        depth, base = self.own("scale_depth"), self.own("dim_model_base")  # of MiniCPM
        scales = depth and depth / self.num_layers**0.5, base and base / hidden
        return {
            "norm_eps": float(eps),
            "attention_softcap": raw.get("attn_logit_softcapping"),
            "final_softcap": raw.get("final_logit_softcapping"),
            "query_scale": float(self.own("attention_multiplier") or scale),
            "embedding_scale": float(self.own("embedding_multiplier") or self.own("scale_emb") or root),
            "residual_scale": float(self.own("residual_multiplier") or scales[0] or 1.0),
            "logit_scale": float(self.own("logit_scale") or scales[1] or 1.0) / float(self.own("logits_scaling") or 1.0),
        }

    def _layer_types(self) -> list[str]:
        given = self.raw.get("layer_types")
        if given is not None:
            return [str(kind) for kind in given]
        rule = WINDOW_RULES.get(self.family)
        return [SLIDING if rule is not None and rule(self.raw, layer) else FULL for layer in range(self.num_layers)]

    def _windows(self) -> tuple[int | None, ...]:
        size = self.raw.get("sliding_window")
        if not size or self.raw.get("use_sliding_window") is False:
            return (None,) * self.num_layers
        return tuple(int(size) if kind == SLIDING else None for kind in self.layer_types)

    def _ropes(self) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
        given = dict(self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {})
        if self.family not in ("gemma3_text", "olmo3"):
            without = self._layers_without_rope()
            return (self._rope(given),), tuple(None if layer in without else 0 for layer in range(self.num_layers))
        nested = FULL in given or SLIDING in given
        full = dict((given.get(FULL) if nested else given) or {})
        local = dict((given.get(SLIDING) if nested else None) or {})
        is_gemma = self.is_gemma
        full.setdefault("rope_theta", self.raw.get("rope_theta", 1_000_000.0))
        local.setdefault("rope_theta", self.raw.get("rope_local_base_freq", 10_000.0) if is_gemma else full["rope_theta"])
        order = tuple(1 if kind == SLIDING else 0 for kind in self.layer_types)
        return (self._rope(full), self._rope(local)), order

    def _rope(self, given: Raw) -> Rope:
        kind = str(given.get("rope_type") or given.get("type") or "default")
        if self.family == "phi3" and kind in ("su", "yarn"):
            kind = "longrope"  # names of the same thing in early Phi-3 files
        outside = self.raw.get("partial_rotary_factor") or self.own("rotary_pct") or 1.0
        partial = given.get("partial_rotary_factor") or outside
        theta = given.get("rope_theta") or self.raw.get("rope_theta") or self.raw.get("rotary_emb_base") or 10_000.0
        outer = self.raw.get("original_max_position_embeddings")
        original = outer or given.get("original_max_position_embeddings") or self.trained_len
        numbers = {key: given[key] for key in _ROPE_KEYS if given.get(key) is not None}
        return Rope(
            kind=kind,
            theta=float(theta),
            dim=int((self.head_dim if self.latent is None else self.latent.rope_dim) * partial),
            trained_len=self.trained_len,
            original_len=int(original),
            short_factor=tuple(given.get("short_factor") or ()),
            long_factor=tuple(given.get("long_factor") or ()),
            **numbers,
        )

    def _layers_without_rope(self) -> set[int]:
        if self.family == "cohere2" and self.raw.get("sliding_window"):
            return {layer for layer, kind in enumerate(self.layer_types) if kind == FULL}
        return set(without_rope(self.raw)) if self.family == "smollm3" else set()


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


_ROPE_KEYS = (
    "factor attention_factor low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate".split()
)
