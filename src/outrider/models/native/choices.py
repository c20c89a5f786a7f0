"""The random numbers of the sampler and the target's choices, each as one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref

import torch
from torch import Tensor

from outrider.core.rng import Noise
from outrider.models.native.structs import ChoicesStruct


def gumbel_stream(library: ctypes.CDLL, keys: Tensor, length: int) -> Tensor:
    """[..., length] standard Gumbel numbers, float32: ``core.rng.gumbel_stream`` to within the last bit of a logarithm."""
    keys = keys.contiguous()
    numbers = torch.empty(*keys.shape, length)
    library.outrider_gumbel(ctypes.c_void_p(keys.data_ptr()), keys.numel(), length, ctypes.c_void_p(numbers.data_ptr()))
    return numbers


def choose(
    library: ctypes.CDLL, logits: Tensor, temperatures: Sequence[float], *, noise: Noise, depths: Tensor | None
) -> Tensor:
    """[B, M] the target's choices, as ``core.sampling.Law`` makes them with the numbers of ``gumbel_stream``."""
    logits, chosen = logits.contiguous(), torch.empty(logits.shape[:2], dtype=torch.int64)
    warmth = (ctypes.c_float * len(temperatures))(*temperatures)
    call = ChoicesStruct(*logits.shape, logits.data_ptr(), addressof(warmth))
    if depths is not None:
        depths = depths.contiguous()
        call.seeds, call.positions, call.depths = noise.seeds.data_ptr(), noise.positions.data_ptr(), depths.data_ptr()
    call.out = chosen.data_ptr()
    library.outrider_choose(byref(call))
    return chosen
