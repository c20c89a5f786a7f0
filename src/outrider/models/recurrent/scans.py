"""Which scan a Mamba-2 layer gets."""

from __future__ import annotations

import torch

from outrider.cache.replay import ScanShape
from outrider.models.gpu import runs_kernels
from outrider.models.native.build import built_library
from outrider.models.recurrent.mamba_scan import MambaNumbers, MambaScan, PlainScan
from outrider.models.recurrent.scan_native import NativeScan, can_scan


def scan_of(shape: ScanShape, numbers: MambaNumbers, *, fast: bool) -> MambaScan:
    """The fastest scan for these tensors; PyTorch's where they are not float32, or ``fast`` is not wanted."""
    device = numbers.rate.device
    if not fast or numbers.rate.dtype != torch.float32:
        return PlainScan(shape, numbers)
    if runs_kernels(device):
        from outrider.models.recurrent.scan_triton import TritonScan  # needs triton

        return TritonScan(shape, numbers)
    library = built_library() if device.type == "cpu" and can_scan(shape) else None
    return PlainScan(shape, numbers) if library is None else NativeScan(library, shape, numbers)
