"""Heads without attention on a CPU: a whole best-first tree is one native call (``heads.hpp``)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_void_p, cast
from typing import final

import torch
from torch import Tensor

from outrider.core.tree import TokenTree
from outrider.models.heads.head import Head
from outrider.models.heads.level_weights import Affine, HeadWeights, LevelWeights
from outrider.models.native.build import built_library
from outrider.models.native.growing import Growing, GrownTrees
from outrider.models.native.packed_model import Arena
from outrider.models.native.structs import MatrixStruct

_MOVING = {"nothing": 0, "tokens": 1, "cell": 2}
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class _LevelStruct(Structure):
    _fields_ = [
        ("cell", MatrixStruct),
        *((name, c_void_p) for name in ("norm", "shift", "embedding")),
        *((name, MatrixStruct) for name in ("enter", "bent")),
        ("blocks", POINTER(MatrixStruct)),
        ("readout", MatrixStruct),
        *((name, c_int32) for name in ("num_blocks", "place")),
    ]


class _HeadsStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("is_bf16", "hidden", "embedded", "vocab", "num_levels", "moving")),
        *((name, c_int32) for name in ("keeps_state", "from_state", "joins", "is_gelu", "halves")),
        *((name, c_float) for name in ("eps", "cell_eps", "share")),
        ("state_norm", c_void_p),
        ("level", POINTER(_LevelStruct)),
    ]


class _CallStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("batch", "num_states", "num_threads")),
        *((name, c_void_p) for name in ("states", "roots")),
    ]


def native_heads(head: Head) -> NativeHeads | None:
    """The heads on a CPU; None if native code does not support their kind, or cannot run."""
    weights, like = head.native_levels(), next(head.parameters())
    if weights is None or like.device.type != "cpu" or like.dtype not in _TYPES:
        return None
    library = built_library()
    return None if library is None else NativeHeads(library, head, weights)


@final
class NativeHeads:
    """Grows best-first trees below roots, from the target's newest states. It owns the memory that its structures point to."""

    def __init__(self, library: ctypes.CDLL, head: Head, weights: HeadWeights) -> None:
        """Packs the matrices; those in IEEE's 16 bits are widened."""
        config, parameter = head.config, next(head.parameters()).dtype
        self._dtype = torch.bfloat16 if parameter == torch.bfloat16 else torch.float32
        self._library, self._kept, self._packed = library, list[object](), dict[int, int]()
        self._arena = Arena(library, sum(_size(matrix, self._dtype) for matrix in _matrices(weights)))
        whole = config.draft_vocab_size == config.vocab_size
        self._ids = None if whole else head.target_ids.contiguous()
        self._vocab_size, self._num_threads = config.vocab_size, torch.get_num_threads()
        levels = (_LevelStruct * len(weights.levels))(*map(self._level, weights.levels))
        embedding = weights.levels[0].embedding
        self._struct = _HeadsStruct(
            *(self._dtype == torch.bfloat16, config.hidden_size, 0 if embedding is None else embedding.shape[1]),
            *(config.draft_vocab_size, len(levels), _MOVING[weights.moving]),
            *(weights.keeps_state, weights.from_state, weights.joins, weights.activation == "gelu", weights.is_scaled),
            *(config.norm_eps, weights.cell_eps, weights.share),
            None if weights.state_norm is None else self._floats(weights.state_norm),
            levels,
        )
        self._call = library.outrider_heads
        self._call.restype = None

    def tree(self, states: Tensor, roots: Tensor, growing: Growing) -> TokenTree:
        """Trees below the roots [B], from the newest states [B, K, H]."""
        states = states.float().contiguous()
        batch_size, num_states, _ = states.shape
        wanted = Growing(
            growing.search, growing.plan, growing.tempering, growing.noise, ids=self._ids, in_beams=growing.in_beams
        )
        grown = GrownTrees(wanted, self._vocab_size)
        call = _CallStruct(batch_size, num_states, self._num_threads, states.data_ptr(), roots.data_ptr())
        self._call(byref(self._struct), byref(call), byref(grown.struct))
        return grown.below(roots)[0]

    def _level(self, level: LevelWeights) -> _LevelStruct:
        cell, enter, bent = (
            MatrixStruct() if one is None else self._matrix(one) for one in (level.cell, level.enter, level.bent)
        )
        norms = (None, None) if level.cell_norm is None else tuple(map(self._floats, level.cell_norm))
        embedding = None if level.embedding is None else self._keep(level.embedding.to(self._dtype).contiguous())
        blocks = (MatrixStruct * len(level.blocks))(*map(self._matrix, level.blocks))
        self._kept.append(blocks)
        readout = self._matrix(Affine(level.readout))
        return _LevelStruct(
            cell, *norms, embedding, enter, bent, cast(blocks, POINTER(MatrixStruct)), readout, len(blocks), level.place
        )

    def _matrix(self, affine: Affine) -> MatrixStruct:
        """A packed matrix. A matrix that several levels share is packed once."""
        outputs, inputs = affine.weight.shape
        source = affine.weight.data_ptr()
        if source not in self._packed:
            weight = affine.weight.to(self._dtype).contiguous()
            self._packed[source] = self._arena.take(_size(weight, self._dtype))
            self._library.outrider_pack(
                c_void_p(self._packed[source]), c_void_p(weight.data_ptr()), outputs, inputs, self._dtype.itemsize
            )
            self._kept.append(affine.weight)  # its address stays its own
        bias = None if affine.bias is None else self._floats(affine.bias)
        return MatrixStruct(self._packed[source], bias, None, inputs, outputs)

    def _floats(self, values: Tensor) -> int:
        return self._keep(values.float().contiguous())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _matrices(weights: HeadWeights) -> list[Tensor]:
    """Each matrix once."""
    found = dict[int, Tensor]()
    for level in weights.levels:
        affines = [one for one in (level.cell, level.enter, level.bent, *level.blocks) if one is not None]
        found |= {matrix.data_ptr(): matrix for matrix in (level.readout, *(one.weight for one in affines))}
    return list(found.values())


def _size(matrix: Tensor, dtype: torch.dtype) -> int:
    """Bytes of a packed matrix: blocks of 16 outputs, steps of 32 inputs, whole lines."""
    outputs, inputs = matrix.shape
    return -(-outputs // 16) * 16 * -(-inputs // 32) * 32 * dtype.itemsize
