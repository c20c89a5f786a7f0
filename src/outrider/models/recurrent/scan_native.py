"""Tree scans as one native call (``models/native/scan_mamba.hpp``, ``scan_delta.hpp``). ``mamba_scan.py`` and ``delta_scan.py``
are the oracles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref
from typing import Any, final

import torch
from torch import Tensor

from outrider.cache.replay import ScanShape
from outrider.models.native.structs import ScanStruct
from outrider.models.recurrent.delta_scan import DeltaNumbers
from outrider.models.recurrent.layers import LayerScan, RecurrentPass
from outrider.models.recurrent.mamba_scan import MambaNumbers

_LANES = 16


def can_scan(shape: ScanShape) -> bool:
    """Whether the sizes fit vectors of sixteen numbers."""
    return not any(size % _LANES for size in (shape.head_dim, shape.state_size, shape.conv_size))


def native_mamba(library: ctypes.CDLL, shape: ScanShape, numbers: MambaNumbers) -> LayerScan:
    """The scan of a Mamba-2 layer."""
    scan = NativeScan(library.outrider_mamba_scan, shape, (numbers.weight, numbers.rate, numbers.time_bias))
    scan.call.low, scan.call.high = numbers.limit
    scan.call.bias, scan.call.skip = scan.keep(numbers.bias), scan.keep(numbers.skip)
    return scan


def native_delta(library: ctypes.CDLL, shape: ScanShape, numbers: DeltaNumbers) -> LayerScan:
    """The scan of a gated delta layer."""
    return NativeScan(library.outrider_delta_scan, shape, (numbers.weight, numbers.rate, numbers.time_bias))


@final
class NativeScan(LayerScan):
    """One layer's scan, in float32."""

    def __init__(self, run: Callable[[Any], Any], shape: ScanShape, numbers: tuple[Tensor, Tensor, Tensor]) -> None:
        """``numbers``: weight of the convolution, rates and biases of time."""
        self._run, self._shape = run, shape
        self._kept: list[Tensor] = []
        self.call = call = ScanStruct()
        call.heads, call.head_dim, call.groups = shape.num_heads, shape.head_dim, shape.num_groups
        call.state_size, call.conv_len = shape.state_size, shape.conv_len
        weight, rate, time_bias = numbers
        call.weight, call.rate, call.time_bias = self.keep(weight.T.contiguous()), self.keep(rate), self.keep(time_bias)

    def keep(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor, which lives as long as this does."""
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()

    def __call__(self, projected: Tensor, layer: int, step: RecurrentPass) -> Tensor:
        columns, parents = step.cache.columns(layer), step.tree.parents.contiguous()
        projected = projected.contiguous()
        out = torch.empty(step.batch_size, step.num_nodes, self._shape.num_heads * self._shape.head_dim)
        call = ScanStruct.from_buffer_copy(self.call)
        call.batch, call.nodes, call.start = step.batch_size, step.tree.num_nodes, step.start
        call.begin, call.end = columns.begin, columns.end
        call.columns, call.numbers = columns.log.shape[1:]
        call.num_threads = torch.get_num_threads()
        call.projected, call.log, call.state = projected.data_ptr(), columns.log.data_ptr(), columns.state.data_ptr()
        call.parents, call.out = parents.data_ptr(), out.data_ptr()
        self._run(byref(call))
        return out
