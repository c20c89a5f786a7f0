"""A model's weights in the layout of the native pass, and the memory they lie in."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.decoder_weights import HELD, STORED_ROWS, LayerWeights, StoredBytes, Weights
from outrider.models.native.structs import LayerStruct, MatrixStruct, ModelStruct
from outrider.models.packed import pack

_BLOCK = 16
_LINE = 64
_LARGE_PAGE = 1 << 21
_SIXTEEN = {12: 2, 13: 3}
"""Types of 16 bits in a table of rows (``quantised/stored.py``), and how ``blocks.hpp`` numbers them."""
_PACKED = 2
"""What is added to such a type where an embedding is read from the packed head."""
_IN_PLACE = 4
"""How ``blocks.hpp`` numbers matrices that stay where somebody holds them."""
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class _Arena:
    """Memory for all matrices of a model in one piece, on large pages: they are read from end to end in every pass."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(num_bytes + _LARGE_PAGE, dtype=torch.uint8)
        self._used = -self._memory.data_ptr() % _LARGE_PAGE
        library.outrider_large_pages(c_void_p(self.take(0)), c_size_t(num_bytes))

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
        self._library, self._kept, self._bits, self._stored_in = library, list[Tensor](), bits, weights.file
        self._arena = _Arena(library, sum(self._size(*matrix) for matrix in _matrices(config, weights)))
        self.num_bytes = self._arena.num_bytes
        has_stored = any(_is_stored(matrix) and not _is_held(matrix) for matrix, _ in _matrices(config, weights))
        layers = (LayerStruct * config.num_layers)(*(self._layer(config, i, layer) for i, layer in enumerate(weights.layers)))
        head = self._matrix(weights.head, None, config.hidden_size)
        embedding, embedding_type = self._embedding(weights, head) if embeds else (None, 0)
        self.struct = ModelStruct(
            *(int(weights.dtype == torch.bfloat16), int(has_stored), config.hidden_size, config.num_layers),
            *(config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_size, config.vocab_size),
            *(_ACTIVATIONS[config.activation], embedding_type),
            *(config.norm_eps, config.query_scale, config.embedding_scale),
            *(config.attention_softcap or 0.0, config.final_softcap or 0.0),
            embedding,
            self._floats(weights.norm),
            head,
            layers,
        )

    def _embedding(self, weights: Weights, head: MatrixStruct) -> tuple[int, int]:
        """Where the embedding lies, and its type if its rows are stored, which are read one by one; 0 for floats."""
        weight = weights.embedding
        if not _is_stored(weight):
            return self._keep(weight.contiguous()), 0
        begin, storage = weight[0].tolist()
        if storage in _SIXTEEN and weights.head is weight:
            return int(head.packed), storage + _PACKED
        return self._file.address + begin, storage

    @property
    def _file(self) -> StoredBytes:
        assert self._stored_in is not None, "stored matrices come with their file"
        return self._stored_in

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
        if _is_held(weight):
            return MatrixStruct(self._keep(_held_blocks(weight)), self._floats(bias), None, inputs, len(weight), _IN_PLACE)
        packed = self._arena.take(self._size(weight, inputs))
        if _is_stored(weight) and int(weight[0, 1]) in _SIXTEEN:
            table = weight.contiguous()
            pointers = (packed, self._file.address, table.data_ptr())
            self._library.outrider_pack_rows(*map(c_void_p, pointers), len(table), inputs)
            self._forget(table)
            return MatrixStruct(packed, self._floats(bias), None, inputs, len(table), _SIXTEEN[int(table[0, 1])])
        if _is_stored(weight):
            places = self._pack_stored(packed, weight.contiguous(), inputs)
            return MatrixStruct(places, self._floats(bias), None, inputs, len(weight), 1)
        scales = None
        if self._bits == 8:
            rounded = pack(weight, 8)
            weight, scales = rounded.data, self._floats(rounded.scales[0])
        weight = weight.contiguous()
        source, num_bytes = c_void_p(weight.data_ptr()), weight.element_size()
        self._library.outrider_pack(c_void_p(packed), source, len(weight), inputs, num_bytes)
        return MatrixStruct(packed, self._floats(bias), scales, inputs, len(weight))

    def _pack_stored(self, packed: int, table: Tensor, inputs: int) -> int:
        """Where it says for every block of outputs where it lies and of what type it is."""
        places = torch.zeros(-(-len(table) // _BLOCK), 2, dtype=torch.int64)
        pointers = (places.data_ptr(), packed, self._file.address, table.data_ptr())
        self._library.outrider_pack_stored(*map(c_void_p, pointers), len(table), inputs, torch.get_num_threads())
        self._forget(table)
        return self._keep(places)

    def _forget(self, table: Tensor) -> None:
        """Give back the rows of a matrix that has been packed."""
        begins = table[table[:, 1] > 0, 0]
        self._file.forget(int(begins.min()), int(begins.max()))

    def _size(self, weight: Tensor, inputs: int) -> int:
        """Bytes of a packed matrix. Gates and ups are padded apart, so two blocks of outputs are the unit."""
        if _is_held(weight):
            return 0
        if _is_stored(weight) and int(weight[0, 1]) in _SIXTEEN:
            return _padded(len(weight)) * -(-inputs // 32) * 32 * 2
        if _is_stored(weight):
            types, counts = weight[:, 1].unique(return_counts=True)
            found = zip(types.tolist(), counts.tolist(), strict=True)
            return sum(_padded(count) // _BLOCK * self._block_size(storage, inputs) for storage, count in found)
        num_bytes = 1 if self._bits == 8 else weight.element_size()
        return _padded(len(weight)) * -(-inputs // 32) * 32 * num_bytes

    def _block_size(self, storage: int, inputs: int) -> int:
        size = self._library.outrider_packed_size
        size.restype = c_size_t
        return size(c_int64(storage), c_int32(inputs))

    def _floats(self, values: Tensor | None) -> int | None:
        return None if values is None else self._keep(values.float().contiguous())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _matrices(config: ModelConfig, weights: Weights) -> list[tuple[Tensor, int]]:
    """Every matrix, and its number of inputs."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    inner = [
        ((layer.qkv, hidden), (layer.out, heads), (layer.gate_up, hidden), (layer.down, config.mlp_size))
        for layer in weights.layers
    ]
    return [(weights.head, hidden), *(matrix for layer in inner for matrix in layer)]


def _is_stored(weight: Tensor) -> bool:
    return weight.dtype == STORED_ROWS


def _is_held(weight: Tensor) -> bool:
    return _is_stored(weight) and int(weight[0, 1]) == HELD


def _held_blocks(table: Tensor) -> Tensor:
    """[blocks, 2] where sixteen rows begin, and how many they are, fewer at the end."""
    counts = torch.full((-(-len(table) // _BLOCK),), _BLOCK, dtype=STORED_ROWS)
    counts[-1] = len(table) - _BLOCK * (len(counts) - 1)
    return torch.stack((table[::_BLOCK, 0], counts), 1)


def _padded(outputs: int) -> int:
    return -(-outputs // (2 * _BLOCK)) * 2 * _BLOCK


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
