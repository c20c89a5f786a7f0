"""Reads the tensors of a checkpoint into the matrices of the decoder.

Files are memory-mapped and read tensor by tensor, so that no more than one layer exists twice. Query, key and value
matrices become one, gate and up become one (some families store them so); a tied head *is* the embedding. Everything is checked
against the config as it is read: a wrong checkpoint fails here with its reason, not in a matrix product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.decoder_weights import STORED_ROWS, Division, LayerWeights, Weights
from outrider.models.features import ModelConfig
from outrider.models.latent_weights import latent_tensors
from outrider.models.names import named_in
from outrider.models.rope import head_order
from outrider.models.weight_files import open_weights, weight_files

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource(ABC):
    """Named tensors of a checkpoint, read when asked for."""

    origin: str
    """The file or folder, for messages."""

    @property
    @abstractmethod
    def names(self) -> frozenset[str]: ...

    @abstractmethod
    def read(self, name: str) -> Tensor: ...

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, which must exist, be of this shape and hold real numbers."""
        if name not in self.names:
            raise ModelError(f"{self.origin}: tensor {name!r} is missing; the files are incomplete: fetch the model again")
        tensor = self.read(name)
        self.check_shape(name, tuple(tensor.shape), shape)
        if tensor.dtype not in _FLOATS:
            found = f"{self.origin}: tensor {name!r} is stored as {str(tensor.dtype).removeprefix('torch.')}"
            raise ModelError(f"{found}; only float32, bfloat16, float16 and float64 can be read: use an unquantised checkpoint")
        return tensor

    def check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Refuse a tensor that is not of the shape the model wants."""
        if found != wanted:
            what = f"{self.origin}: tensor {name!r} has shape {list(found)} but config.json asks for {list(wanted)}"
            raise ModelError(f"{what}; weights and config belong to different models: fetch both again")


class TensorDict(TensorSource):
    """Tensors in memory, dropped once read so that none is held twice."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str = "tensors") -> None:
        self.origin = origin
        self._tensors = dict(tensors)
        self._names = frozenset(self._tensors)

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def read(self, name: str) -> Tensor:
        return self._tensors.pop(name)


class SafetensorsFolder(TensorSource):
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` names."""

    def __init__(self, folder: Path) -> None:
        self.origin = str(folder)
        self.files = weight_files(folder)
        self._handles = {path: open_weights(path) for path in self.files}
        self._where = {name: handle for handle in self._handles.values() for name in handle.keys()}  # noqa: SIM118

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    @property
    def num_parameters(self) -> int:
        return sum(map(self.size, self._where))

    def size(self, name: str) -> int:
        """Number of elements of a tensor, from its file's header."""
        return math.prod(self._where[name].get_slice(name).get_shape())

    @property
    def dtypes(self) -> list[str]:
        """Storage types, as the file names them."""
        return sorted({handle.get_slice(name).get_dtype() for name, handle in self._where.items()})

    def read(self, name: str) -> Tensor:
        try:
            return self._where[name].get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ModelError(f"{self.origin}: tensor {name!r} cannot be read ({error}); fetch the model again") from error


def read_weights(
    source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, share: Division | None = None
) -> Weights:
    """All weights of a checkpoint, fused and converted. With a ``share``, only its part, one layer at a time."""
    return _WeightReader(source, config, dtype=dtype, device=device).weights(share)


def read_final_norm(source: TensorSource, config: ModelConfig) -> Tensor:
    """[H] float32 weight of the final norm."""
    return _WeightReader(source, config, dtype=torch.float32, device=torch.device("cpu")).final_norm()


class _WeightReader:
    def __init__(self, source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._config, self._dtype, self._device = source, config, dtype, device
        self._prefix = self._find_prefix()

    def weights(self, share: Division | None) -> Weights:
        config = self._config
        embedding = self._matrix("embed_tokens", config.vocab_size, config.hidden_size)
        embedding = embedding if share is None else share.rows(embedding)
        wanted = range(config.num_layers) if share is None else share.layers(config.num_layers)
        layers = [self._part(layer, share) for layer in wanted]
        head = embedding if config.tied_head else self._head()
        head = head if share is None or config.tied_head else share.rows(head)
        norm, bias = self.final_norm(), self._norm_bias("norm", config.hidden_size)
        return Weights(embedding, layers, norm, head, bias)

    def _part(self, layer: int, share: Division | None) -> LayerWeights:
        whole = self._layer(layer)
        return whole if share is None else share.layer(self._config, whole)

    def final_norm(self) -> Tensor:
        return self._norm("norm", self._config.hidden_size)

    def _find_prefix(self) -> str:
        """The prefix of ``embed_tokens``: usually "model.", longer in multimodal checkpoints, empty in bare ones."""
        ending = self._name("embed_tokens.weight")
        found = [name.removesuffix(ending) for name in self._source.names if name.endswith(ending)]
        return min(found, key=len) if found else "model."

    def _head(self) -> Tensor:
        outer = self._prefix.replace("model.", "") if self._prefix.startswith("language_model.") else ""
        name = "language_model.lm_head.weight" if outer == "language_" else self._name("lm_head.weight")
        return self._place(self._source.take(name, self._config.vocab_size, self._config.hidden_size))

    def _layer(self, layer: int) -> LayerWeights:
        config, at = self._config, f"layers.{layer}."
        hidden, out, heads = config.hidden_size, f"{at}self_attn.o_proj", config.num_heads
        has_experts = config.experts is not None and config.experts.layers[layer]
        return LayerWeights(
            **self._queries_and_keys(layer),
            out=self._matrix(out, hidden, heads * (config.latent.value_dim if config.latent else config.head_dim)),
            out_bias=self._bias(out, hidden) if config.out_bias else None,
            q_norm=self._query_norm(layer, "q_norm", heads) if config.qk_norm else None,
            k_norm=self._query_norm(layer, "k_norm", config.num_kv_heads) if config.qk_norm else None,
            sinks=self._read(f"{at}self_attn.sinks", heads).float().to(self._device) if config.sinks else None,
            **self._norms(at),
            **(self._experts(at) if has_experts else self._mlp(f"{at}mlp.", config.mlp_size)),
        )

    def _norms(self, at: str) -> dict[str, Any]:
        """The norms of the residual stream and of what is added to it, by their names in ``LayerWeights``."""
        config, hidden = self._config, self._config.hidden_size
        found: dict[str, Tensor | None] = {"attention_norm": None, "mlp_norm": None}
        after = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        if config.pre_norms:
            names = {"attention_norm": "input_layernorm"} if config.one_norm else {}
            names = names or {"attention_norm": "input_layernorm", "mlp_norm": after}
            found |= {kind: self._norm(at + name, hidden) for kind, name in names.items()}
            found |= {f"{kind}_bias": self._norm_bias(at + name, hidden) for kind, name in names.items()}
        if config.post_norms:
            found["attention_post_norm"] = self._norm(f"{at}post_attention_layernorm", hidden)
            found["mlp_post_norm"] = self._norm(f"{at}post_feedforward_layernorm", hidden)
        return found

    def _queries_and_keys(self, layer: int) -> dict[str, Any]:
        config, at = self._config, f"layers.{layer}.self_attn."
        if config.latent is not None:
            return {name: self._place(found) for name, found in latent_tensors(config, layer, self._read).items()}
        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        parts = self._three(at, "weight", sizes, config.hidden_size)
        biases = self._three(at, "bias", sizes) if config.qkv_bias else []
        for group in (parts, biases):
            group[:2] = [self._ordered(layer, part) for part in group[:2]]
        return {
            "qkv": self._place(torch.cat(parts)),
            "qkv_bias": self._place(torch.cat(biases)) if biases else None,
        }

    def _three(self, at: str, kind: str, sizes: list[int], *shape: int) -> list[Tensor]:
        """Queries, keys and values of a layer. Files hold them as three tensors, one stacked tensor, or (GPT-NeoX) head by
        head."""
        fused = f"{at}qkv_proj.{kind}"
        if self._prefix + self._name(fused) not in self._source.names:
            return [self._read(f"{at}{letter}_proj.{kind}", rows, *shape) for letter, rows in zip("qkv", sizes, strict=True)]
        whole = self._read(fused, sum(sizes), *shape)
        if self._config.family != "gpt_neox":
            return list(whole.split(sizes))
        return [part.flatten(0, 1) for part in whole.unflatten(0, (-1, 3, self._config.head_dim)).unbind(1)]

    def _mlp(self, at: str, mlp: int) -> dict[str, Any]:
        config, names = self._config, ("gate_proj", "up_proj") if self._config.gated else ("up_proj",)
        hidden, fused = config.hidden_size, f"{at}gate_up_proj"
        if f"{self._prefix}{fused}.weight" in self._source.names:
            return {"gate_up": self._matrix(fused, 2 * mlp, hidden), "down": self._matrix(f"{at}down_proj", hidden, mlp)}
        parts = [self._read(f"{at}{name}.weight", mlp, hidden) for name in names]
        biases = [self._read(f"{at}{name}.bias", mlp) for name in names] if config.mlp_bias else []
        return {
            "gate_up": self._place(torch.cat(parts)),
            "gate_up_bias": self._place(torch.cat(biases)) if biases else None,
            "down": self._matrix(f"{at}down_proj", hidden, mlp),
            "down_bias": self._bias(f"{at}down_proj", hidden) if config.mlp_bias else None,
        }

    def _experts(self, at: str) -> dict[str, Any]:
        """All experts of a layer, and its router."""
        experts, hidden = self._config.experts, self._config.hidden_size
        assert experts is not None
        count, size, inside = experts.count, experts.size, f"{at}mlp.experts."
        if self._prefix + f"{inside}gate_up_proj_bias" in self._source.names:  # gpt-oss: inputs first, gates and ups in turn
            gate_up = self._read(f"{inside}gate_up_proj", count, hidden, 2 * size).transpose(1, 2)
            bias = self._read(f"{inside}gate_up_proj_bias", count, 2 * size)
            return {
                "router": self._matrix(f"{at}mlp.router", count, hidden),
                "router_bias": self._bias(f"{at}mlp.router", count),
                "gate_up": self._place(torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)),
                "gate_up_bias": self._place(torch.cat((bias[:, ::2], bias[:, 1::2]), 1)),
                "down": self._place(self._read(f"{inside}down_proj", count, size, hidden).transpose(1, 2).contiguous()),
                "down_bias": self._place(self._read(f"{inside}down_proj_bias", count, hidden)),
            }
        one = [self._mlp(f"{inside}{index}.", size) for index in range(count)]
        found = {name: torch.stack([expert[name] for expert in one]) for name, first in one[0].items() if first is not None}
        found["router"] = self._matrix(f"{at}mlp.gate", count, hidden)
        if self._config.mlp_bias:
            found["router_bias"] = self._bias(f"{at}mlp.gate", count)
        if experts.corrected:
            found["router_correction"] = self._read(f"{at}mlp.gate.e_score_correction_bias", count).float().to(self._device)
        if experts.shared_size:
            shared = self._mlp(f"{at}mlp.shared_experts.", experts.shared_size)
            found |= {"shared_gate_up": shared["gate_up"], "shared_down": shared["down"]}
        return found

    def _ordered(self, layer: int, rows: Tensor) -> Tensor:
        """Rows of query or key heads with rotary partners half a head apart."""
        config = self._config
        rope = config.rope_of_layer[layer]
        order = None
        if rope is not None:
            order = head_order(config.ropes[rope].dim, config.head_dim, interleaved=config.interleaved_rope)
        return rows if order is None else rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)

    def _query_norm(self, layer: int, name: str, num_heads: int) -> Tensor:
        """[D], or [heads * D] where heads have weights of their own: in one tensor, or one each (StableLM)."""
        config, at = self._config, f"layers.{layer}.self_attn."
        if config.qk_norm_span == "head":
            return self._ordered(layer, self._norm(at + name, config.head_dim))
        if config.qk_norm_span == "whole":
            return self._ordered(layer, self._norm(at + name, num_heads * config.head_dim))
        if config.family == "cohere":
            whole = self._read(f"{at}{name}.weight", num_heads, config.head_dim).flatten()
        else:
            one = [self._read(f"{at}{name[0]}_layernorm.norms.{head}.weight", config.head_dim) for head in range(num_heads)]
            whole = torch.cat(one)
        return self._place(self._ordered(layer, whole))

    def _norm(self, name: str, size: int) -> Tensor:
        """A norm's weight. 1 + w does not fit into 16 bits, so such weights stay float32."""
        weight = self._read(f"{name}.weight", size)
        offset = self._config.norm_offset
        return (weight.float() + offset).to(self._device) if offset else self._place(weight)

    def _norm_bias(self, name: str, size: int) -> Tensor | None:
        return self._bias(name, size) if self._config.norm_bias else None

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._place(self._read(f"{name}.weight", rows, columns))

    def _bias(self, name: str, size: int) -> Tensor:
        return self._place(self._read(f"{name}.bias", size))

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._source.take(self._prefix + self._name(name), *shape)

    def _name(self, name: str) -> str:
        return named_in(self._config.family, name)

    def _place(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, converted. The row table of a stored matrix (``gguf/stored.py``) is unchanged."""
        return tensor.to(self._device, STORED_ROWS if tensor.dtype == STORED_ROWS else self._dtype)
