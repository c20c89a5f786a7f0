"""The tree scan of a Mamba-2 layer as one native call (``models/native/scan.hpp``). ``mamba_scan.py`` is the oracle."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import final

import torch
from torch import Tensor

from outrider.cache.replay import ScanShape
from outrider.models.native.structs import ScanStruct
from outrider.models.recurrent.layers import RecurrentPass
from outrider.models.recurrent.mamba_scan import MambaNumbers, MambaScan

_LANES = 16


def can_scan(shape: ScanShape) -> bool:
    """Vectors of sixteen have to fit."""
    return not any(size % _LANES for size in (shape.head_dim, shape.state_size, shape.conv_size))


@final
class NativeScan(MambaScan):
    """One layer's scan, in float32."""

    def __init__(self, library: ctypes.CDLL, shape: ScanShape, numbers: MambaNumbers) -> None:
        self._library, self._shape = library, shape
        self._weight = numbers.weight.T.contiguous()
        self._numbers = numbers
        self._call = call = ScanStruct()
        call.heads, call.head_dim, call.groups = shape.num_heads, shape.head_dim, shape.num_groups
        call.state_size, call.conv_len = shape.state_size, shape.conv_len
        call.low, call.high = numbers.limit
        call.weight, call.bias = self._weight.data_ptr(), None if numbers.bias is None else numbers.bias.data_ptr()
        call.rate, call.time_bias, call.skip = (one.data_ptr() for one in (numbers.rate, numbers.time_bias, numbers.skip))

    def __call__(self, projected: Tensor, layer: int, step: RecurrentPass) -> Tensor:
        columns, parents = step.cache.columns(layer), step.tree.parents.contiguous()
        projected = projected.contiguous()
        out = torch.empty(step.batch_size, step.num_nodes, self._shape.num_heads * self._shape.head_dim)
        call = ScanStruct.from_buffer_copy(self._call)
        call.batch, call.nodes, call.start = step.batch_size, step.tree.num_nodes, step.start
        call.begin, call.end = columns.begin, columns.end
        call.columns, call.numbers = columns.log.shape[1:]
        call.num_threads = torch.get_num_threads()
        call.projected, call.log, call.state = projected.data_ptr(), columns.log.data_ptr(), columns.state.data_ptr()
        call.parents, call.out = parents.data_ptr(), out.data_ptr()
        self._library.outrider_scan(byref(call))
        return out
