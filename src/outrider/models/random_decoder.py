"""A small decoder with random weights, for tests and examples that need keys, values and hidden states."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OptionError, nearest
from outrider.models.config import ModelConfig, config_of
from outrider.models.decoder import Decoder
from outrider.models.decoder_weights import Weights
from outrider.models.families import DEFAULTS
from outrider.models.features import Latent
from outrider.models.names import named_in
from outrider.models.weights import TensorDict, TensorSource, read_weights


def tiny_config(model_type: str = "llama", **changes: Any) -> ModelConfig:
    """A small config of a family; ``changes`` are keys of config.json."""
    raw = {
        "model_type": model_type,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        **changes,
    }
    config = config_of(raw)
    if config is None:
        raise OptionError(f"model_type = {model_type!r} is not of the lean decoder; {nearest(model_type, DEFAULTS)}")
    return config


def tiny_decoder(
    config: ModelConfig | None = None, *, seed: int = 0, sharpness: float = 3.0, noise: float = 0.0, device: str = "cpu"
) -> Decoder:
    """A decoder with random weights. ``noise`` mixes in other weights, so that it drafts worse for the model without.
    ``sharpness`` scales the logits."""
    config = config or tiny_config()
    return Decoder(config, tiny_weights(config, seed=seed, sharpness=sharpness, noise=noise, device=device))


def tiny_weights(
    config: ModelConfig, *, seed: int = 0, sharpness: float = 3.0, noise: float = 0.0, device: str = "cpu"
) -> Weights:
    """The weights of ``tiny_decoder``."""
    generators = [torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)]

    def random(*shape: int) -> Tensor:
        first, second = (torch.randn(shape, generator=generator) for generator in generators)
        return (first + noise * second) / (1 + noise**2) ** 0.5

    tensors: dict[str, Tensor] = {}
    for name, shape in _tensor_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = 0.1 * random(*shape) + (0.0 if name.endswith("bias") else 1.0 - config.norm_offset)
        else:
            is_head = name in ("lm_head.weight", "embed_out.weight")
            tensors[name] = random(*shape) * (sharpness if is_head else 1.0) / shape[1] ** 0.5
    tensors[_renamed(config.family, "model.embed_tokens.weight")] *= config.hidden_size**0.5
    return read_weights(TensorDict(tensors), config, dtype=torch.float32, device=torch.device(device))


def random_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0, rounded: torch.dtype | None = None
) -> Weights:
    """Random weights of any size, drawn on the device tensor by tensor; ``rounded`` to another type first."""
    return read_weights(_Drawn(config, rounded or dtype, device, seed), config, dtype=dtype, device=device)


class _Drawn(TensorSource):
    """A checkpoint whose tensors are drawn when they are asked for."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.origin = "random weights"
        self._config, self._dtype, self._device, self._seed = config, dtype, device, seed
        self._shapes = _tensor_shapes(config)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def read(self, name: str) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(self._seed + zlib.crc32(name.encode()))
        shape = self._shapes[name]
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=torch.float32)
        if len(shape) == 1 or "_proj_bias" in name:
            drawn = 0.1 * drawn + (0.0 if "bias" in name or "sinks" in name else 1.0 - self._config.norm_offset)
        elif "embed" in name and "embed_out" not in name:
            drawn = drawn / self._config.embedding_scale
        else:
            drawn = drawn / shape[1] ** 0.5
        return drawn.to(self._dtype)


def _tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint of this config."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    shapes |= _norm_shapes(config, "model.norm", hidden)
    for layer in range(config.num_layers):
        inner = _attention_shapes(config) | _stream_norm_shapes(config)
        inner |= (
            _expert_shapes(config)
            if config.experts and config.experts.layers[layer]
            else _mlp_shapes(config, "mlp.", config.mlp_size)
        )
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inner.items()}
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return {_renamed(config.family, name): shape for name, shape in shapes.items()}


def _renamed(family: str, name: str) -> str:
    inner = name.removeprefix("model.")
    return name.removesuffix(inner) + named_in(family, inner)


def _matrix_shapes(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _norm_shapes(config: ModelConfig, name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if config.norm_bias else {})}


def _latent_shapes(config: ModelConfig, latent: Latent) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank, at = config.hidden_size, config.num_heads, latent.query_rank, "self_attn."
    shapes = {f"{at}kv_a_layernorm.weight": (latent.rank,)}
    shapes |= _matrix_shapes(f"{at}kv_a_proj_with_mqa", config.head_dim, hidden, bias=config.qkv_bias)
    shapes |= _matrix_shapes(f"{at}kv_b_proj", heads * (latent.nope_dim + latent.value_dim), latent.rank, bias=False)
    shapes |= _matrix_shapes(f"{at}o_proj", hidden, heads * latent.value_dim, bias=config.out_bias)
    if rank is None:
        return shapes | _matrix_shapes(f"{at}q_proj", heads * latent.query_dim, hidden, bias=False)
    shapes |= {f"{at}q_a_layernorm.weight": (rank,)} | _matrix_shapes(f"{at}q_a_proj", rank, hidden, bias=config.qkv_bias)
    return shapes | _matrix_shapes(f"{at}q_b_proj", heads * latent.query_dim, rank, bias=False)


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    if config.latent is not None:
        return _latent_shapes(config, config.latent)
    hidden, head_dim, at = config.hidden_size, config.head_dim, "self_attn."
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    shapes: dict[str, tuple[int, ...]] = {}
    for letter, count in {**heads, "v": config.num_kv_heads}.items():
        shapes |= _matrix_shapes(f"{at}{letter}_proj", count * head_dim, hidden, bias=config.qkv_bias)
    shapes |= _matrix_shapes(f"{at}o_proj", hidden, config.num_heads * head_dim, bias=config.out_bias)
    if config.sinks:
        shapes[f"{at}sinks"] = (config.num_heads,)
    for letter, count in heads.items() if config.qk_norm else ():
        if config.family == "stablelm":
            shapes |= {f"{at}{letter}_layernorm.norms.{head}.weight": (head_dim,) for head in range(count)}
        else:
            sizes = {"head": (head_dim,), "whole": (count * head_dim,), "heads": (count, head_dim)}
            shapes[f"{at}{letter}_norm.weight"] = sizes[config.qk_norm_span]
    return shapes


def _stream_norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names = ["input_layernorm"] if config.pre_norms else []
    if config.pre_norms and not config.one_norm:
        names.append("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm")
    names += ["post_attention_layernorm", "post_feedforward_layernorm"] if config.post_norms else []
    return {key: shape for name in names for key, shape in _norm_shapes(config, name, config.hidden_size).items()}


def _mlp_shapes(config: ModelConfig, at: str, size: int) -> dict[str, tuple[int, ...]]:
    hidden, shapes = config.hidden_size, dict[str, tuple[int, ...]]()
    for name in ("gate_proj", "up_proj") if config.gated else ("up_proj",):
        shapes |= _matrix_shapes(f"{at}{name}", size, hidden, bias=config.mlp_bias)
    return shapes | _matrix_shapes(f"{at}down_proj", hidden, size, bias=config.mlp_bias)


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    count, size, at = experts.count, experts.size, "mlp.experts."
    if config.family == "gpt_oss":
        shapes = _matrix_shapes("mlp.router", count, hidden, bias=True)
        shapes |= {f"{at}gate_up_proj": (count, hidden, 2 * size), f"{at}gate_up_proj_bias": (count, 2 * size)}
        return shapes | {f"{at}down_proj": (count, size, hidden), f"{at}down_proj_bias": (count, hidden)}
    shapes = _matrix_shapes("mlp.gate", count, hidden, bias=False)
    if experts.corrected:
        shapes["mlp.gate.e_score_correction_bias"] = (count,)
    if experts.shared_size:
        shapes |= _mlp_shapes(config, "mlp.shared_experts.", experts.shared_size)
    for expert in range(count):
        shapes |= _mlp_shapes(config, f"{at}{expert}.", size)
    return shapes
