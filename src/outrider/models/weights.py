"""From the tensors of a checkpoint to the matrices the decoder multiplies with.

Files are memory-mapped and read tensor by tensor, so that no more than one layer exists twice. Query, key and value
matrices become one, gate and up become one (some families store them so); a tied head *is* the embedding. Everything is checked
against the config as it is read: a wrong checkpoint fails here with its reason, not in a matrix product.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.errors import ModelError
from outrider.models.config import ModelConfig
from outrider.models.gguf.reader import GGUFFile
from outrider.models.rope import head_order

STORED_ROWS = torch.int64
"""Type of a table of rows, what a matrix is that stays as a GGUF file stores it (``gguf/stored.py``)."""
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
    """Tensors in memory, forgotten once read so that none is held twice."""

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
        self.files = _weight_files(folder)
        self._handles = {path: _open(path) for path in self.files}
        self._where = {name: handle for handle in self._handles.values() for name in handle.keys()}  # noqa: SIM118

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(handle.get_slice(name).get_shape()) for name, handle in self._where.items())

    @property
    def dtypes(self) -> list[str]:
        """Storage types, as the file names them."""
        return sorted({handle.get_slice(name).get_dtype() for name, handle in self._where.items()})

    def read(self, name: str) -> Tensor:
        try:
            return self._where[name].get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ModelError(f"{self.origin}: tensor {name!r} cannot be read ({error}); fetch the model again") from error


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); fetch the file again") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise ModelError(f"{index} is not a weight index ({error}); fetch the file again") from error
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(f"{folder / name} is missing though {index.name} names it; fetch the model again")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder} holds only pytorch_model.bin, a pickle, which can run code when opened and is not read; "
            "save it with transformers' save_pretrained, which writes safetensors"
        )
    raise ModelError(f"{folder} holds no model.safetensors; it is not a complete model folder: fetch the model again")


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. Rows of ``qkv`` are query heads, key heads, value heads; of ``gate_up`` the gate, then up.

    For the native CPU pass, a matrix may be a table of rows of a GGUF file (``gguf/stored.py``)."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Weights:
    """A whole decoder. With a tied head, ``head`` is ``embedding``."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    file: GGUFFile | None = None
    """The GGUF file whose rows the stored matrices are."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the cache and of what is computed."""
        return torch.float32 if self.embedding.dtype == STORED_ROWS else self.embedding.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor once."""
        inner = [tensor for layer in self.layers for tensor in vars(layer).values() if tensor is not None]
        return [self.embedding, *inner, self.norm, *([] if self.head is self.embedding else [self.head])]


def read_weights(source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Weights:
    """All weights of a checkpoint, fused and converted."""
    return _WeightReader(source, config, dtype=dtype, device=device).weights()


class _WeightReader:
    def __init__(self, source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._config, self._dtype, self._device = source, config, dtype, device
        self._prefix = self._find_prefix()

    def weights(self) -> Weights:
        config = self._config
        embedding = self._matrix("embed_tokens", config.vocab_size, config.hidden_size)
        layers = [self._layer(layer) for layer in range(config.num_layers)]
        return Weights(embedding, layers, self._norm("norm", config.hidden_size), self._head(embedding))

    def _find_prefix(self) -> str:
        """What stands before ``embed_tokens``: "model." as a rule, longer in multimodal checkpoints, nothing in bare ones."""
        ending = "embed_tokens.weight"
        found = [name.removesuffix(ending) for name in self._source.names if name.endswith(ending)]
        return min(found, key=len) if found else "model."

    def _head(self, embedding: Tensor) -> Tensor:
        if self._config.tied_head:
            return embedding
        outer = self._prefix.replace("model.", "") if self._prefix.startswith("language_model.") else ""
        name = "language_model.lm_head.weight" if outer == "language_" else "lm_head.weight"
        return self._place(self._source.take(name, self._config.vocab_size, self._config.hidden_size))

    def _layer(self, layer: int) -> LayerWeights:
        config, at = self._config, f"layers.{layer}."
        hidden, mlp = config.hidden_size, config.mlp_size
        q_rows = config.num_heads * config.head_dim
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        qkv, qkv_bias = self._qkv(layer)
        gate_up, gate_up_bias = self._gate_up(at)
        return LayerWeights(
            attention_norm=self._norm(f"{at}input_layernorm", hidden),
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=self._matrix(f"{at}self_attn.o_proj", hidden, q_rows),
            out_bias=self._bias(f"{at}self_attn.o_proj", hidden) if config.out_bias else None,
            q_norm=self._head_norm(layer, "q_norm") if config.qk_norm else None,
            k_norm=self._head_norm(layer, "k_norm") if config.qk_norm else None,
            mlp_norm=self._norm(f"{at}{mlp_norm}", hidden),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=self._matrix(f"{at}mlp.down_proj", hidden, mlp),
            down_bias=self._bias(f"{at}mlp.down_proj", hidden) if config.mlp_bias else None,
            attention_post_norm=self._norm(f"{at}post_attention_layernorm", hidden) if config.post_norms else None,
            mlp_post_norm=self._norm(f"{at}post_feedforward_layernorm", hidden) if config.post_norms else None,
        )

    def _qkv(self, layer: int) -> tuple[Tensor, Tensor | None]:
        config, at = self._config, f"layers.{layer}.self_attn."
        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        named = list(zip([f"{at}{letter}_proj" for letter in "qkv"], sizes, strict=True))
        if f"{self._prefix}{at}qkv_proj.weight" in self._source.names:
            parts = list(self._read(f"{at}qkv_proj.weight", sum(sizes), config.hidden_size).split(sizes))
        else:
            parts = [self._read(f"{name}.weight", rows, config.hidden_size) for name, rows in named]
        biases = [self._read(f"{name}.bias", rows) for name, rows in named] if config.qkv_bias else []
        for group in (parts, biases):
            group[:2] = [self._ordered(layer, part) for part in group[:2]]
        return self._place(torch.cat(parts)), self._place(torch.cat(biases)) if biases else None

    def _gate_up(self, at: str) -> tuple[Tensor, Tensor | None]:
        config, names = self._config, ("gate_proj", "up_proj")
        if f"{self._prefix}{at}mlp.gate_up_proj.weight" in self._source.names:
            return self._matrix(f"{at}mlp.gate_up_proj", 2 * config.mlp_size, config.hidden_size), None
        parts = [self._read(f"{at}mlp.{name}.weight", config.mlp_size, config.hidden_size) for name in names]
        biases = [self._read(f"{at}mlp.{name}.bias", config.mlp_size) for name in names] if config.mlp_bias else []
        return self._place(torch.cat(parts)), self._place(torch.cat(biases)) if biases else None

    def _ordered(self, layer: int, rows: Tensor) -> Tensor:
        """Rows of query or key heads with rotary partners half a head apart."""
        rope = self._config.rope_of_layer[layer]
        order = None if rope is None else head_order(self._config.ropes[rope].dim, self._config.head_dim)
        return rows if order is None else rows.unflatten(0, (-1, self._config.head_dim))[:, order].flatten(0, 1)

    def _head_norm(self, layer: int, name: str) -> Tensor:
        norm = self._norm(f"layers.{layer}.self_attn.{name}", self._config.head_dim)
        return self._ordered(layer, norm)

    def _norm(self, name: str, size: int) -> Tensor:
        """A norm's weight. 1 + w does not fit into 16 bits, so such weights stay float32."""
        weight = self._read(f"{name}.weight", size)
        offset = self._config.norm_offset
        return (weight.float() + offset).to(self._device) if offset else self._place(weight)

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._place(self._read(f"{name}.weight", rows, columns))

    def _bias(self, name: str, size: int) -> Tensor:
        return self._place(self._read(f"{name}.bias", size))

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._source.take(self._prefix + name, *shape)

    def _place(self, tensor: Tensor) -> Tensor:
        """On the device, in the type; the table of a stored matrix (``gguf/stored.py``) stays one."""
        return tensor.to(self._device, STORED_ROWS if tensor.dtype == STORED_ROWS else self._dtype)
