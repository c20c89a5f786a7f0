"""The C structures of ``decoder.cpp``, field by field, and the memory behind them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, c_float, c_int32, c_uint8, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from outrider.core.interfaces import Doubt
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.core.truncation import Cut
from outrider.models.config import ModelConfig
from outrider.models.gguf.stored import storage_number
from outrider.models.packed import pack
from outrider.models.rope import RotaryTable
from outrider.models.weights import LayerWeights, Weights

_BLOCK = 16
_LINE = 64
_LARGE_PAGE = 1 << 21
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class MatrixStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("packed", "bias", "scales")),
        *((name, c_int32) for name in ("inputs", "outputs", "storage")),
    ]


class LayerStruct(Structure):
    _fields_ = [
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *(
            (name, c_void_p)
            for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "q_norm", "k_norm")
        ),
        ("rope", c_int32),
        ("window", c_int32),
    ]


class ModelStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("is_bf16", "has_stored", "hidden", "layers", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("mlp", "vocab")),
        ("activation", c_int32),
        *((name, c_float) for name in ("norm_eps", "query_scale", "embedding_scale", "attention_cap", "final_cap")),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", MatrixStruct),
        ("layer", POINTER(LayerStruct)),
    ]


class PassStruct(Structure):
    """One call. Arrays given to it live as long as it does."""

    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "start", "first_layer", "last_layer", "capacity", "num_threads")),
        ("num_taps", c_int32),
        *((name, c_void_p) for name in ("tokens", "parents", "sizes", "lengths", "cache", "cosines", "sines")),
        *((name, c_void_p) for name in ("attention_on", "mlp_on", "tap_layers", "taps", "hidden", "logits")),
        ("last_only", c_int32),
        ("cache_rows", c_int32),
        ("sum", c_void_p),
    ]

    def give_tree(self, tree: TokenTree, lengths: Sequence[int]) -> None:
        self._tokens = tree.tokens.contiguous()
        self._parents = None if tree.is_chain else tree.parents.contiguous()
        self._sizes, self._lengths = (c_int32 * len(lengths))(*tree.sizes), (c_int32 * len(lengths))(*lengths)
        self.tokens, self.parents = self._tokens.data_ptr(), None if self._parents is None else self._parents.data_ptr()
        self.sizes, self.lengths = addressof(self._sizes), addressof(self._lengths)

    def give_tables(self, tables: Sequence[RotaryTable]) -> None:
        self._cosines = (c_void_p * len(tables))(*(table.cos.data_ptr() for table in tables))
        self._sines = (c_void_p * len(tables))(*(table.sin.data_ptr() for table in tables))
        self.cosines, self.sines = addressof(self._cosines), addressof(self._sines)

    def give_route(self, route: Route) -> None:
        self._on = [(c_uint8 * route.num_layers)(*part) for part in (route.attention, route.mlp)]
        self.attention_on, self.mlp_on = map(addressof, self._on)

    def give_hidden(self, hidden: Tensor) -> None:
        """[B, N, H] float32, contiguous: read where the pass begins with states, written when it ends."""
        self._hidden = hidden
        self.hidden = hidden.data_ptr()

    def give_taps(self, taps: Sequence[int], tapped: Tensor) -> None:
        """``tapped`` [taps, B, N, H], contiguous, is where their states go."""
        self.num_taps, self.tap_layers, self.taps = len(taps), addressof(_layer_array(tuple(taps))), tapped.data_ptr()


@lru_cache(maxsize=64)
def _layer_array(layers: tuple[int, ...]) -> Array[c_int32]:
    """Kept, since drafters ask for the same ones in every round."""
    return (c_int32 * len(layers))(*layers)


class CutStruct(Structure):
    _fields_ = [("top_k", c_int32), ("top_p", c_float), ("min_p", c_float)]


def cut_array(cuts: Sequence[Cut] | None) -> Array[CutStruct] | None:
    return None if cuts is None else (CutStruct * len(cuts))(*(CutStruct(cut.top_k, cut.top_p, cut.min_p) for cut in cuts))


class ChainStruct(Structure):
    _fields_ = [
        ("longest", c_int32),
        *((name, c_void_p) for name in ("depths", "temperatures", "seeds", "positions", "guesses", "cuts")),
        *((name, c_void_p) for name in ("trust", "beliefs")),
        ("level", c_float),
        ("place", c_float),
    ]

    def give_doubt(self, doubt: Doubt | None) -> None:
        if doubt is None:
            return
        self._trust, self._beliefs = (c_float * len(doubt.trust))(*doubt.trust), (c_float * (len(doubt.trust) * self.longest))()
        self.trust, self.beliefs = addressof(self._trust), addressof(self._beliefs)
        self.level, self.place = doubt.level, doubt.place

    def believed(self, depths: Sequence[int]) -> list[list[float]] | None:
        """How sure each row was of its guesses; None where nothing was doubted."""
        if not self.trust:
            return None
        return [self._beliefs[row * self.longest : row * self.longest + depth] for row, depth in enumerate(depths)]


class ChoicesStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("batch", "nodes", "vocab")),
        *((name, c_void_p) for name in ("logits", "temperatures", "seeds", "positions", "depths", "out")),
    ]


class TreeStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("longest", "width", "children", "capacity")),
        ("tau", c_float),
        *((name, c_void_p) for name in ("depths", "most", "temperatures", "seeds", "positions")),
        *((name, c_void_p) for name in ("tokens", "parents", "numbers", "counts", "cuts")),
    ]


class _Arena:
    """Memory for all matrices of a model in one piece, on large pages: they are read from end to end in every pass."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(num_bytes + _LARGE_PAGE, dtype=torch.uint8)
        self._used = -self._memory.data_ptr() % _LARGE_PAGE
        library.outrider_large_pages(c_void_p(self.take(0)), ctypes.c_size_t(num_bytes))

    def take(self, num_bytes: int) -> int:
        """Where the next ``num_bytes`` lie."""
        begin = self._used
        self._used += -(-num_bytes // _LINE) * _LINE
        assert self._used <= len(self._memory), "the arena was made for all matrices"
        return self._memory.data_ptr() + begin


class PackedModel:
    """A model in the layout of the native pass, its matrices in 8 ``bits`` if wanted. Owns the memory it points to."""

    def __init__(
        self, library: ctypes.CDLL, config: ModelConfig, weights: Weights, bits: int = 16, *, embeds: bool = True
    ) -> None:
        """``embeds`` False: a pass brings the states that enter the first layer (a share of a divided model)."""
        self._library, self._kept, self._bits = library, list[Tensor](), bits
        matrices = [weights.head, *(m for layer in weights.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down))]
        self._arena = _Arena(library, sum(self._size(matrix) for matrix in matrices))
        self.num_bytes = self._arena.num_bytes
        is_bf16, has_stored = weights.embedding.dtype == torch.bfloat16, any(map(_is_stored, matrices))
        layers = (LayerStruct * config.num_layers)(*(self._layer(config, i, layer) for i, layer in enumerate(weights.layers)))
        self.struct = ModelStruct(
            *(int(is_bf16), int(has_stored), config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads),
            *(config.head_dim, config.mlp_size, config.vocab_size, _ACTIVATIONS[config.activation]),
            *(config.norm_eps, config.query_scale, config.embedding_scale),
            *(config.attention_softcap or 0.0, config.final_softcap or 0.0),
            self._keep(weights.embedding.contiguous()) if embeds else None,
            self._floats(weights.norm),
            self._matrix(weights.head, None, config.hidden_size),
            layers,
        )

    def _layer(self, config: ModelConfig, index: int, weights: LayerWeights) -> LayerStruct:
        qkv_bias, gate_up_bias = weights.qkv_bias, weights.gate_up_bias
        rope, window = config.rope_of_layer[index], config.windows[index]
        hidden = config.hidden_size
        return LayerStruct(
            self._matrix(_by_head(weights.qkv, config), None if qkv_bias is None else _by_head(qkv_bias, config), hidden),
            self._matrix(weights.out, weights.out_bias, config.num_heads * config.head_dim),
            self._matrix(_in_turn(weights.gate_up), None if gate_up_bias is None else _in_turn(gate_up_bias), hidden),
            self._matrix(weights.down, weights.down_bias, config.mlp_size),
            *map(self._floats, (weights.attention_norm, weights.mlp_norm)),
            *map(self._floats, (weights.attention_post_norm, weights.mlp_post_norm, weights.q_norm, weights.k_norm)),
            -1 if rope is None else rope,
            window or 0,
        )

    def _matrix(self, weight: Tensor, bias: Tensor | None, inputs: int) -> MatrixStruct:
        outputs, storage = weight.shape[0], storage_number(weight, inputs)
        packed = self._arena.take(self._size(weight))
        scales = None
        if storage:
            source = weight.contiguous()
            self._library.outrider_pack_stored(c_void_p(packed), c_void_p(source.data_ptr()), outputs, inputs, storage)
            return MatrixStruct(packed, self._floats(bias), None, inputs, outputs, storage)
        if self._bits == 8:
            rounded = pack(weight, 8)
            weight, scales = rounded.data, self._floats(rounded.scales[0])
        weight = weight.contiguous()
        source, num_bytes = c_void_p(weight.data_ptr()), weight.element_size()
        self._library.outrider_pack(c_void_p(packed), source, outputs, inputs, num_bytes)
        return MatrixStruct(packed, self._floats(bias), scales, inputs, outputs)

    def _size(self, weight: Tensor) -> int:
        """Bytes of a packed matrix. Gates and ups are padded apart, so two blocks of outputs are the unit."""
        outputs, inputs = weight.shape
        padded = -(-outputs // (2 * _BLOCK)) * 2 * _BLOCK
        if _is_stored(weight):
            return padded * inputs  # bytes of a row
        num_bytes = 1 if self._bits == 8 else weight.element_size()
        return padded * -(-inputs // 32) * 32 * num_bytes

    def _floats(self, values: Tensor | None) -> int | None:
        return None if values is None else self._keep(values.float().contiguous())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _is_stored(weight: Tensor) -> bool:
    return weight.dtype == torch.uint8


def _by_head(qkv: Tensor, config: ModelConfig) -> Tensor:
    """The queries of a key head, its key and its value next to each other, head by head, and what is rotated together, too."""
    num_kv_heads, head_dim = config.num_kv_heads, config.head_dim
    parts = qkv.split([config.num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim])
    by_head = torch.cat([part.unflatten(0, (num_kv_heads, -1)) for part in parts], 1).flatten(0, 1)
    if head_dim % (2 * _BLOCK):
        return by_head
    return by_head.unflatten(0, (-1, 2, head_dim // (2 * _BLOCK), _BLOCK)).transpose(1, 2).flatten(0, 3)


def _in_turn(gate_up: Tensor) -> Tensor:
    """Gates and ups in turn, sixteen at a time, so that a product ends with both of them at hand; padded with zeros."""
    pair = gate_up.unflatten(0, (2, -1))
    missing = -pair.shape[1] % _BLOCK
    if missing:
        pair = torch.cat((pair, pair.new_zeros(2, missing, *pair.shape[2:])), 1)
    return pair.unflatten(1, (-1, _BLOCK)).transpose(0, 1).flatten(0, 2).contiguous()
