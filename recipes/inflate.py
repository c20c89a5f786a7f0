"""An 8B-shaped model that says what a small one says: speed is measured on real shapes, acceptance on a real language.

Every matrix of the small Llama becomes a corner of a large one. The rest is noise that is only ever multiplied by zero. It is
never zeros, which run faster than data. The residual stream keeps h live dimensions and one constant c; H - h - 1 are zero.

    norm    w' = w sqrt(h / H),  eps' = (eps - c^2 / h) h / H          so that  norm'(x, c, 0) = norm(x)
    heads   pair i of a rotated head becomes pair i D / d, which turns as fast; q' = q sqrt(D / d); a query group is
            repeated and its output halved as often
    layers  added ones have values and "up" rows blind to the live dimensions, so they add exactly zero
    vocab   rows of added tokens read -K from the constant dimension, far below every real logit

Exact in real arithmetic; in bfloat16 only the rounding of q' differs (and of w', unless H / h is a power of 4).

    python recipes/inflate.py            # shapes and sizes
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.models.config import ModelConfig, config_of
from outrider.models.load import read_config
from outrider.models.weights import SafetensorsFolder, TensorSource, Weights, read_weights

_NOISE = 0.02
_PUSH = 2.0**14
_CONSTANT_NORM = 64.0


@dataclass(frozen=True, kw_only=True)
class InflatedShape:
    """Sizes to inflate to; each must be at least the small model's."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 16384
    family: str = "llama"
    """Features of this family, with the same language: "llama", "mistral" (``window``) or "mixtral" (``experts``)."""
    window: int | None = None
    """Positions that a layer sees: what lies further back is forgotten, so the text is the small model's only up to here."""
    experts: int = 0
    """Every expert is the small MLP in noise of its own, so that any of them, in any mixture, says the same."""
    chosen: int = 2


LLAMA_8B = InflatedShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256)
"""Llama-3-8B."""
ONE_LAYER_DRAFT = InflatedShape(hidden=1024, layers=1, heads=16, kv_heads=8, head_dim=64, mlp=4096, vocab=128256)
"""A draft of one layer with the vocabulary of the 8B model: most of it is the head."""
MISTRAL_7B = replace(LLAMA_8B, vocab=32000, family="mistral", window=4096)
MIXTRAL = replace(LLAMA_8B, layers=16, mlp=7168, vocab=32000, family="mixtral", experts=8)
"""Mixtral-8x7B with half of its layers and half of its experts' width: 12 GB."""
FAMILIES = ("llama", "mistral", "mixtral")


def inflated_raw_config(folder: str, shape: InflatedShape) -> dict[str, Any]:
    """config.json of the inflated model."""
    raw = read_config(Path(folder))
    small = config_of(raw)
    assert small is not None, "the bundled models are Llamas"
    constant = _constant(small.norm_eps, small.hidden_size)
    eps = (small.norm_eps - constant**2 / small.hidden_size) * small.hidden_size / shape.hidden
    return {
        **raw,
        "model_type": shape.family,
        "sliding_window": shape.window,
        **({"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen} if shape.experts else {}),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
    }


def inflated_weights(
    folder: str, shape: InflatedShape, *, dtype: torch.dtype, device: torch.device
) -> tuple[ModelConfig, Weights]:
    """The inflated model, made on the device matrix by matrix."""
    config = config_of(inflated_raw_config(folder, shape))
    assert config is not None
    return config, read_weights(Inflated(folder, shape, dtype=dtype, device=device), config, dtype=dtype, device=device)


def _constant(eps: float, hidden: int) -> float:
    """c with c^2 / h about half of eps, exact in bfloat16."""
    return float(torch.tensor(math.sqrt(eps * hidden / 2)).to(torch.bfloat16))


@final
class Inflated(TensorSource):
    """The tensors of an inflated checkpoint, made when asked for."""

    def __init__(self, folder: str, shape: InflatedShape, *, dtype: torch.dtype, device: torch.device) -> None:
        """``folder`` of a Llama, or of heads whose layers are like one's."""
        self.origin = f"{folder} inflated"
        self.shape, self._dtype, self._device = shape, dtype, device
        small = config_of({**read_config(Path(folder)), "model_type": "llama"})
        assert small is not None, "the bundled models are Llamas"
        self.small, self._source = small, SafetensorsFolder(Path(folder))
        self._check()
        self._generator = torch.Generator(device).manual_seed(1)
        self._tied = small.tied_head

    def _check(self) -> None:
        small, big = self.small, self.shape
        group, big_group = small.num_heads // small.num_kv_heads, big.heads // big.kv_heads
        pairs = {
            "hidden": (small.hidden_size + 1, big.hidden),
            "layers": (small.num_layers, big.layers),
            "kv_heads": (small.num_kv_heads, big.kv_heads),
            "head_dim": (small.head_dim, big.head_dim),
            "mlp": (small.mlp_size, big.mlp),
            "vocab": (small.vocab_size, big.vocab),
        }
        if big.family not in FAMILIES or (big.family == "mixtral") != bool(big.experts):
            raise OptionError(
                f"family = {big.family!r}, experts = {big.experts}; use one of {', '.join(FAMILIES)}, mixtral with experts"
            )
        for name, (least, given) in pairs.items():
            if given < least:
                raise OptionError(f"{name} = {given} is too small to inflate to; it must be at least {least}")
        if big.head_dim % small.head_dim or big_group % group:
            raise OptionError("head_dim and heads per key head must be multiples of the small model's; use other sizes")

    @property
    def names(self) -> frozenset[str]:
        inner = "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
        inner += f" {' '.join(self._mlp_names())}"
        layers = [f"model.layers.{layer}.{name}.weight" for layer in range(self.shape.layers) for name in inner.split()]
        return frozenset([*layers, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])

    def _mlp_names(self) -> list[str]:
        if not self.shape.experts:
            return ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        experts = [f"block_sparse_moe.experts.{expert}.{name}" for expert in range(self.shape.experts) for name in EXPERT_KINDS]
        return ["block_sparse_moe.gate", *experts]

    def read(self, name: str) -> Tensor:
        if name.endswith("block_sparse_moe.gate.weight"):
            return self.noise(self.shape.experts, self.shape.hidden)
        if ".experts." in name:
            name = f"{name.split('.block_sparse_moe.', maxsplit=1)[0]}.mlp.{EXPERT_KINDS[name.split('.')[-2]]}.weight"
        kind = name.removesuffix(".weight").split(".")[-1]
        if kind == "embed_tokens":
            return self._embedding()
        if kind == "lm_head":
            return self._head()
        if kind.endswith("norm"):
            return self.norm(name, is_added=_is_added(name, self.small.num_layers))
        layer = int(name.split(".")[2])
        rows, columns = ROWS[kind](self), COLUMNS[kind](self)
        return self.matrix(name if layer < self.small.num_layers else None, kind, rows=rows, columns=columns)

    def noise(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, _NOISE, generator=self._generator)

    def small_tensor(self, name: str) -> Tensor:
        return self._source.read(name).to(self._device, torch.float32)

    def _embedding(self) -> Tensor:
        small, size = self.small_tensor("model.embed_tokens.weight"), self.small.hidden_size
        matrix = self.noise(self.shape.vocab, self.shape.hidden)
        matrix[: len(small)] = 0
        matrix[: len(small), :size] = small.to(self._dtype)
        matrix[: len(small), size] = _constant(self.small.norm_eps, size)
        return matrix

    def _head(self) -> Tensor:
        return self.readout("model.embed_tokens.weight" if self._tied else "lm_head.weight", self.shape.vocab)

    def readout(self, name: str, num_tokens: int) -> Tensor:
        """An output matrix of ``num_tokens`` rows; those beyond the small one's are pushed down."""
        small, size = self.small_tensor(name), self.small.hidden_size
        matrix = self.noise(num_tokens, self.shape.hidden)
        matrix[: len(small), : size + 1] = 0
        matrix[: len(small), :size] = small.to(self._dtype)
        matrix[len(small) :, size] = -_PUSH
        return matrix

    def norm(self, name: str, *, is_added: bool = False) -> Tensor:
        size = self.small.hidden_size
        weight = 1 + self.noise(self.shape.hidden)
        if not is_added:
            weight[:size] = (self.small_tensor(name) * math.sqrt(size / self.shape.hidden)).to(self._dtype)
        weight[size] = _CONSTANT_NORM if name in ("model.norm.weight", "norm.weight") else 1.0
        return weight

    def matrix(self, name: str | None, kind: str, *, rows: Rows, columns: Columns) -> Tensor:
        """Noise, zero where a live input meets an output that counts, the small matrix in its place."""
        matrix = self.noise(rows.count, columns.count)
        if name is None and kind in ("o_proj", "down_proj"):
            return matrix  # an added layer: its inputs are zero
        blind = rows.zero if name is not None else rows.zero_in_added
        matrix[_grid(blind, columns.live)] = 0
        if name is None:
            return matrix
        matrix[_grid(rows.real, columns.live)] = 0
        small = self.small_tensor(name)[rows.source][:, columns.source] * rows.scale * columns.scale
        matrix[_grid(rows.real, columns.real)] = small.to(self._dtype)
        return matrix

    # Rows and columns of the matrices, as index lists.

    def rotated_dims(self) -> Tensor:
        """Where the dimensions of a small head stand in a large one, so that pairs turn as fast as before."""
        small, big = self.small.head_dim, self.shape.head_dim
        pairs = torch.arange(small // 2) * (big // small)
        return torch.cat((pairs, pairs + big // 2))

    def repeats(self) -> int:
        return (self.shape.heads // self.shape.kv_heads) // (self.small.num_heads // self.small.num_kv_heads)

    def query_heads(self) -> tuple[Tensor, Tensor]:
        """Large heads that are real, and the small head each one is."""
        group, big_group = self.small.num_heads // self.small.num_kv_heads, self.shape.heads // self.shape.kv_heads
        heads = torch.arange(self.small.num_kv_heads * big_group)
        return heads, heads // big_group * group + heads % group


@dataclass(frozen=True, eq=False)
class Rows:
    """Outputs of a matrix."""

    count: int
    real: Tensor
    source: Tensor
    """Row of the small matrix for each real row."""
    zero: Tensor
    """Outputs that must be zero."""
    zero_in_added: Tensor
    """Outputs that must be zero in an added layer."""
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Columns:
    """Inputs of a matrix."""

    count: int
    real: Tensor
    source: Tensor
    live: Tensor
    """Inputs that may differ from zero."""
    scale: float = 1.0


def _is_added(name: str, num_layers: int) -> bool:
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers


def _grid(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, None], columns[None, :]


_NONE = torch.zeros(0, dtype=torch.int64)


def _slots(heads: Tensor, dims: Tensor, head_dim: int) -> Tensor:
    return (heads[:, None] * head_dim + dims).flatten()


def _others(count: int, taken: Tensor) -> Tensor:
    free = torch.ones(count, dtype=torch.bool)
    free[taken] = False
    return free.nonzero()[:, 0]


def _query_rows(model: Inflated) -> Rows:
    small, big = model.small, model.shape
    heads, sources = model.query_heads()
    real = _slots(heads, model.rotated_dims(), big.head_dim)
    source = _slots(sources, torch.arange(small.head_dim), small.head_dim)
    return Rows(big.heads * big.head_dim, real, source, _NONE, _NONE, scale=math.sqrt(big.head_dim / small.head_dim))


def _key_rows(model: Inflated) -> Rows:
    small, big = model.small, model.shape
    heads = torch.arange(small.num_kv_heads)
    real = _slots(heads, model.rotated_dims(), big.head_dim)
    source = torch.arange(small.num_kv_heads * small.head_dim)
    zero = _others(small.num_kv_heads * big.head_dim, real)  # dimensions of a real head that it did not have
    return Rows(big.kv_heads * big.head_dim, real, source, zero, _NONE)


def _value_rows(model: Inflated) -> Rows:
    small, big = model.small, model.shape
    count = big.kv_heads * big.head_dim
    real = _slots(torch.arange(small.num_kv_heads), torch.arange(small.head_dim), big.head_dim)
    source = torch.arange(small.num_kv_heads * small.head_dim)
    return Rows(count, real, source, _others(count, real), torch.arange(count))


def _hidden_rows(model: Inflated) -> Rows:
    real = torch.arange(model.small.hidden_size)
    return Rows(model.shape.hidden, real, real, torch.arange(len(real), model.shape.hidden), _NONE)


def _mlp_rows(model: Inflated, *, blind: bool) -> Rows:
    count, real = model.shape.mlp, torch.arange(model.small.mlp_size)
    return Rows(count, real, real, torch.arange(len(real), count) if blind else _NONE, torch.arange(count) if blind else _NONE)


def _hidden_columns(model: Inflated) -> Columns:
    real = torch.arange(model.small.hidden_size)
    return Columns(model.shape.hidden, real, real, torch.arange(len(real) + 1))


def _head_columns(model: Inflated) -> Columns:
    small, big = model.small, model.shape
    heads, sources = model.query_heads()
    dims = torch.arange(small.head_dim)
    real, source = _slots(heads, dims, big.head_dim), _slots(sources, dims, small.head_dim)
    return Columns(big.heads * big.head_dim, real, source, real, scale=1 / model.repeats())


def _mlp_columns(model: Inflated) -> Columns:
    real = torch.arange(model.small.mlp_size)
    return Columns(model.shape.mlp, real, real, real)


EXPERT_KINDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""What an expert's matrices are called."""
ROWS = {
    "q_proj": _query_rows,
    "k_proj": _key_rows,
    "v_proj": _value_rows,
    "o_proj": _hidden_rows,
    "gate_proj": lambda model: _mlp_rows(model, blind=False),
    "up_proj": lambda model: _mlp_rows(model, blind=True),
    "down_proj": _hidden_rows,
}
COLUMNS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), _hidden_columns),
    "o_proj": _head_columns,
    "down_proj": _mlp_columns,
}


def main() -> None:
    for part, shape in (("target", LLAMA_8B), ("target", MISTRAL_7B), ("target", MIXTRAL), ("draft", ONE_LAYER_DRAFT)):
        raw = inflated_raw_config(bundled_path(part), shape)
        attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
        mlps = min(shape.chosen, shape.experts) if shape.experts else 1
        num_read = shape.layers * (attention + 3 * shape.hidden * shape.mlp * mlps) + shape.vocab * shape.hidden
        print(f"{part}: {shape}\n  {2 * num_read / 1e9:.2f} GB read per pass in bfloat16, norm eps {raw['rms_norm_eps']:.3g}")


if __name__ == "__main__":
    main()
