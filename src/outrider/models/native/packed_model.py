"""A model's weights in the layout of the native pass, in memory of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_size_t, c_void_p, pointer
from typing import overload

import torch
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.decoder_weights import HELD, STORED_ROWS, LayerWeights, StoredBytes, Weights
from outrider.models.native.instruction_sets import isa_here
from outrider.models.native.packed_parts import experts_struct, in_turn, latent_struct, part_matrices, widest_mlp
from outrider.models.native.structs import ExpertsStruct, LayerStruct, MatrixStruct, ModelStruct
from outrider.models.packed import codes_and_scales, pack

_BLOCK = 16
_LINE = 64
_LARGE_PAGE = 1 << 21
_SIXTEEN = (14, 15)
"""Types of 16 bits in a table of rows (``quantised/stored.py``)."""
_HALF, _BRAIN = _SIXTEEN
_CODES, _HALVES = 1, 2
"""Flags in ``model.hpp`` for stored matrices: some are quantised, some are F16."""
_PACKED = 2
"""Added to such a type if the embedding is read from the packed head."""
_IN_PLACE = 4
"""Type number in ``blocks.hpp`` of matrices that stay in the memory of another program part."""
_ROUNDING, _WITH_FLOATS = 1, 6
"""Type numbers there of quantised matrices: inputs are rounded to 8 bits, or stay floats."""
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped": 3}
_SPANS = {"head": 0, "heads": 1, "whole": 2}


class Arena:
    """Memory for all matrices of a model in one piece, on large pages: they are read from end to end in every pass."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(num_bytes + _LARGE_PAGE, dtype=torch.uint8)
        self._used = -self._memory.data_ptr() % _LARGE_PAGE
        library.outrider_large_pages(c_void_p(self.take(0)), c_size_t(num_bytes))

    def take(self, num_bytes: int) -> int:
        """Address of the next ``num_bytes``."""
        begin = self._used
        self._used += -(-num_bytes // _LINE) * _LINE
        assert self._used <= len(self._memory), "the arena was made for all matrices"
        return self._memory.data_ptr() + begin


class PackedModel:
    """A model in the layout of the native pass, with matrices of 8 ``bits`` if wanted. It owns the memory it points to."""

    def __init__(
        self, library: ctypes.CDLL, config: ModelConfig, weights: Weights, bits: int = 16, *, embeds: bool = True
    ) -> None:
        """``embeds`` False: a pass is given the states that enter the first layer (a share of a divided model)."""
        self._library, self._kept, self._bits = library, list[Tensor](), bits
        self._stored_in, self._float_inputs = weights.file, weights.float_inputs
        self._dtype, matrices = weights.dtype, _matrices(config, weights)
        self._is_short = isa_here().reads_halves and weights.dtype == torch.float32 and self._are_short(matrices)
        self._arena = Arena(library, sum(self._size(*matrix) for matrix in matrices))
        self.num_bytes = self._arena.num_bytes
        kinds = {int(matrix[0, 1]) for matrix, *_ in matrices if _is_stored(matrix)}
        has_codes = bool(kinds - {*_SIXTEEN, HELD}) and not weights.float_inputs
        has_stored = (_CODES if has_codes else 0) | (_HALVES if _HALF in kinds else 0)
        layers = (LayerStruct * config.num_layers)(*(self._layer(config, i, layer) for i, layer in enumerate(weights.layers)))
        head = self.matrix(weights.head, None, config.hidden_size)
        embedding, embedding_type = self._embedding(weights, head) if embeds else (None, 0)
        self.struct = ModelStruct(
            *(int(weights.dtype == torch.bfloat16), has_stored, config.hidden_size, config.num_layers),
            *(config.num_heads, config.num_kv_heads, config.head_dim, widest_mlp(config), config.vocab_size),
            *(_ACTIVATIONS[config.activation], embedding_type),
            *(config.norm_kind == "layer", config.gated, config.parallel, _SPANS[config.qk_norm_span]),
            *(config.norm_eps, config.query_scale, config.embedding_scale),
            *(config.attention_softcap or 0.0, config.final_softcap or 0.0, config.residual_scale, config.logit_scale),
            embedding,
            self.floats(weights.norm),
            self.floats(weights.norm_bias),
            head,
            MatrixStruct() if weights.entry is None else self.matrix(weights.entry, None, 2 * config.hidden_size),
            layers,
        )

    def _are_short(self, matrices: Sequence[tuple[Tensor, int, bool]]) -> bool:
        """Whether every weight of a float32 model is a bfloat16, as in a checkpoint that was widened. Then its matrices are
        packed in 16 bits: products have the same bits and read half the bytes."""
        are_brain = self._library.outrider_are_brain
        are_floats = self._bits == 16 and all(matrix.dtype == torch.float32 for matrix, *_ in matrices)
        every = (matrix.contiguous() for matrix, *_ in matrices)
        return are_floats and all(are_brain(c_void_p(one.data_ptr()), c_size_t(one.numel())) for one in every)

    def _embedding(self, weights: Weights, head: MatrixStruct) -> tuple[int, int]:
        """Address of the embedding, and its type if its rows are stored and read one by one; 0 for floats."""
        weight = weights.embedding
        if not _is_stored(weight):
            return self._keep(weight.contiguous()), _HALF if weight.dtype == torch.float16 else 0
        begin, storage = weight[0].tolist()
        if storage in _SIXTEEN and weights.head is weight:
            return int(head.packed), storage + _PACKED
        return self._file.address + begin, storage

    @property
    def _file(self) -> StoredBytes:
        assert self._stored_in is not None, "stored matrices come with their file"
        return self._stored_in

    def _layer(self, config: ModelConfig, index: int, weights: LayerWeights) -> LayerStruct:
        rope, window = config.rope_of_layer[index], config.windows[index]
        gate_up, down, experts = self._mlp(config, weights)
        return LayerStruct(
            self.matrix(_by_head(weights.qkv, config), _by_head(weights.qkv_bias, config), _entering_size(config, weights)),
            self.matrix(weights.out, weights.out_bias, _seen_size(config)),
            gate_up,
            down,
            *map(self.floats, (weights.attention_norm, weights.mlp_norm)),
            *map(self.floats, (weights.attention_post_norm, weights.mlp_post_norm, weights.q_norm, weights.k_norm)),
            *map(self.floats, (weights.attention_norm_bias, weights.mlp_norm_bias, weights.beside_norm, weights.sinks)),
            None if experts is None else pointer(experts),
            None if config.latent is None else pointer(latent_struct(self, config.latent, weights)),
            -1 if rope is None else rope,
            window or 0,
        )

    def _mlp(self, config: ModelConfig, weights: LayerWeights) -> tuple[MatrixStruct, MatrixStruct, ExpertsStruct | None]:
        """The two matrices of an MLP, or the experts in its place."""
        if config.experts is not None and weights.router is not None:
            return MatrixStruct(), MatrixStruct(), experts_struct(self, config.experts, weights, config.hidden_size)
        gate_up, bias = weights.gate_up, weights.gate_up_bias
        if config.gated:
            gate_up, bias = in_turn(gate_up), None if bias is None else in_turn(bias)
        first = self.matrix(gate_up, bias, config.hidden_size)
        return first, self.matrix(weights.down, weights.down_bias, config.mlp_size), None

    def matrix(self, weight: Tensor, bias: Tensor | None, inputs: int, *, is_exact: bool = False) -> MatrixStruct:
        """A packed matrix. It has 8 bits if the model has, unless it ``is_exact``."""
        if _is_held(weight):
            return MatrixStruct(self._keep(_held_blocks(weight)), self.floats(bias), None, inputs, len(weight), _IN_PLACE)
        packed = self._arena.take(self._size(weight, inputs, is_exact))
        if _is_stored(weight) and int(weight[0, 1]) in _SIXTEEN:
            table = weight.contiguous()
            may_round = self._file.adds_halves and not (is_exact or self._float_inputs)
            storage = self._pack_sixteen(packed, table, self._file.address, inputs, may_round=may_round)
            self._forget(table)
            return MatrixStruct(packed, self.floats(bias), None, inputs, len(table), storage)
        if _is_stored(weight):
            places = self._pack_stored(packed, weight.contiguous(), inputs)
            kind = _WITH_FLOATS if self._float_inputs else _ROUNDING
            order = self._file.order_of(weight)
            columns = None if order is None else self._keep(order.to(torch.int32))
            return MatrixStruct(places, self.floats(bias), None, inputs, len(weight), kind, columns)
        scales = None
        if weight.dtype == torch.int8:
            weight, found = codes_and_scales(weight)
            scales = self.floats(found)
        elif self._bits == 8 and not is_exact:
            rounded = pack(weight, 8)
            weight, scales = rounded.data, self.floats(rounded.scales[0])
        else:
            weight = weight.to(self._dtype)
        weight = weight.contiguous()
        weight = weight.to(torch.bfloat16) if self._is_short else weight
        kind = {torch.float16: _HALF, torch.bfloat16: _BRAIN}.get(weight.dtype)
        if kind is not None and len(weight) and self._dtype != torch.bfloat16:
            begins = 2 * inputs * torch.arange(len(weight))
            table = torch.stack((begins, torch.full_like(begins, kind)), 1)
            storage = self._pack_sixteen(packed, table, weight.data_ptr(), inputs, may_round=False)
            return MatrixStruct(packed, self.floats(bias), None, inputs, len(weight), storage)
        source, num_bytes = c_void_p(weight.data_ptr()), weight.element_size()
        self._library.outrider_pack(c_void_p(packed), source, len(weight), inputs, num_bytes)
        return MatrixStruct(packed, self.floats(bias), scales, inputs, len(weight))

    def _pack_sixteen(self, packed: int, table: Tensor, source: int, inputs: int, *, may_round: bool) -> int:
        """Pack rows of 16 bits from ``source``. Returns their type number in ``blocks.hpp``. With ``may_round``, a core that
        can add in 16 bits does so (``half_sums.hpp``)."""
        pointers = map(c_void_p, (packed, source, table.data_ptr()))
        return int(self._library.outrider_pack_rows(*pointers, len(table), inputs, int(may_round)))

    def _pack_stored(self, packed: int, table: Tensor, inputs: int) -> int:
        """Pack stored rows. A table says for every block of outputs its address and type."""
        places = torch.zeros(-(-len(table) // _BLOCK), 2, dtype=torch.int64)
        pointers = (places.data_ptr(), packed, self._file.address, table.data_ptr())
        self._library.outrider_pack_stored(*map(c_void_p, pointers), len(table), inputs, torch.get_num_threads())
        self._forget(table)
        return self._keep(places)

    def _forget(self, table: Tensor) -> None:
        """Free the rows of a matrix that has been packed."""
        begins = table[table[:, 1] > 0, 0]
        self._file.forget(int(begins.min()), int(begins.max()))

    def _size(self, weight: Tensor, inputs: int, is_exact: bool = False) -> int:
        """Bytes of a packed matrix. Gates and ups are padded separately, so two blocks of outputs are the unit."""
        if _is_held(weight):
            return 0
        if _is_stored(weight) and int(weight[0, 1]) in _SIXTEEN:
            return _padded(len(weight)) * -(-inputs // 32) * 32 * 2
        if _is_stored(weight):
            counts = enumerate(weight[:, 1].bincount().tolist())
            return sum(_padded(count) // _BLOCK * self._block_size(storage, inputs) for storage, count in counts if count)
        num_bytes = 1 if self._bits == 8 and not is_exact else 2 if self._is_short else self._dtype.itemsize
        return _padded(len(weight)) * -(-inputs // 32) * 32 * num_bytes

    def _block_size(self, storage: int, inputs: int) -> int:
        size = self._library.outrider_packed_size
        size.restype = c_size_t
        return size(c_int64(storage), c_int32(inputs))

    def floats(self, values: Tensor | None) -> int | None:
        return None if values is None else self._keep(values.float().contiguous())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _matrices(config: ModelConfig, weights: Weights) -> list[tuple[Tensor, int, bool]]:
    """Every matrix with its number of inputs, and whether it keeps the model's type."""
    hidden = config.hidden_size
    found = [(weights.head, hidden, False)]
    found += [] if weights.entry is None else [(weights.entry, 2 * hidden, False)]
    for layer in weights.layers:
        found += [(layer.qkv, _entering_size(config, layer), False), (layer.out, _seen_size(config), False)]
        if layer.router is None:
            found += [(layer.gate_up, hidden, False), (layer.down, config.mlp_size, False)]
        found += part_matrices(config, layer)
    return found


def _entering_size(config: ModelConfig, layer: LayerWeights) -> int:
    """Size of a node's vector from which queries, keys and values are computed."""
    return config.hidden_size if layer.beside_norm is None else 2 * config.hidden_size


def _seen_size(config: ModelConfig) -> int:
    """Size of the output of a node's attention heads."""
    return config.num_heads * (config.head_dim if config.latent is None else config.latent.value_dim)


def _is_stored(weight: Tensor) -> bool:
    return weight.dtype == STORED_ROWS


def _is_held(weight: Tensor) -> bool:
    return _is_stored(weight) and int(weight[0, 1]) == HELD


def _held_blocks(table: Tensor) -> Tensor:
    """[blocks, 2] address of the sixteen rows, and their number, which is smaller at the end."""
    counts = torch.full((-(-len(table) // _BLOCK),), _BLOCK, dtype=STORED_ROWS)
    counts[-1] = len(table) - _BLOCK * (len(counts) - 1)
    return torch.stack((table[::_BLOCK, 0], counts), 1)


def _padded(outputs: int) -> int:
    return -(-outputs // (2 * _BLOCK)) * 2 * _BLOCK


@overload
def _by_head(qkv: Tensor, config: ModelConfig) -> Tensor: ...
@overload
def _by_head(qkv: Tensor | None, config: ModelConfig) -> Tensor | None: ...
def _by_head(qkv: Tensor | None, config: ModelConfig) -> Tensor | None:
    """The matrix with the queries of a key head, its key and its value adjacent, head by head, and with rotated pairs adjacent.
    For latent attention it is unchanged."""
    if qkv is None or config.latent is not None:
        return qkv
    num_kv_heads, head_dim = config.num_kv_heads, config.head_dim
    parts = qkv.split([config.num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim])
    by_head = torch.cat([part.unflatten(0, (num_kv_heads, -1)) for part in parts], 1).flatten(0, 1)
    if head_dim % (2 * _BLOCK):
        return by_head
    return by_head.unflatten(0, (-1, 2, head_dim // (2 * _BLOCK), _BLOCK)).transpose(1, 2).flatten(0, 3)
