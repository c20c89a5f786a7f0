"""Which scan a recurrent layer gets."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from outrider.cache.replay import ScanShape
from outrider.models.gpu import runs_kernels
from outrider.models.native.build import built_library
from outrider.models.recurrent.delta_scan import DeltaNumbers, PlainDelta
from outrider.models.recurrent.layers import LayerScan
from outrider.models.recurrent.mamba_scan import MambaNumbers, PlainMamba
from outrider.models.recurrent.scan_native import can_scan, native_delta, native_mamba


def mamba_scan(shape: ScanShape, numbers: MambaNumbers, *, fast: bool) -> LayerScan:
    """The fastest scan for these tensors; PyTorch's where they are not float32, or ``fast`` is not wanted."""
    if fast and numbers.rate.dtype == torch.float32 and runs_kernels(numbers.rate.device):
        from outrider.models.recurrent.mamba_triton import TritonMamba  # needs triton

        return TritonMamba(shape, numbers)
    library = _library(shape, numbers.rate) if fast else None
    return PlainMamba(shape, numbers) if library is None else native_mamba(library, shape, numbers)


def delta_scan(shape: ScanShape, numbers: DeltaNumbers, *, fast: bool) -> LayerScan:
    """The fastest scan of the delta rule for these tensors, chosen as in ``mamba_scan``."""
    if fast and numbers.rate.dtype == torch.float32 and runs_kernels(numbers.rate.device):
        from outrider.models.recurrent.delta_triton import TritonDelta  # needs triton

        return TritonDelta(shape, numbers)
    library = _library(shape, numbers.rate) if fast else None
    return PlainDelta(shape, numbers) if library is None else native_delta(library, shape, numbers)


def _library(shape: ScanShape, rate: Tensor) -> ctypes.CDLL | None:
    is_fit = rate.dtype == torch.float32 and rate.device.type == "cpu" and can_scan(shape)
    return built_library() if is_fit else None
