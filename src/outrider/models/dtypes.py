"""The types in which a model can be opened, by the names that users give."""

from __future__ import annotations

import torch

from outrider.core.errors import OptionError, nearest
from outrider.models.native import auto_types

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDED_INPUTS = "w8a8"
"""8-bit weights, with activations rounded to 8 bits for every product. On a CPU 32 of them share a scale, as in a Q8_0 file. On
a GPU they are e4m3 floats, and 128 share a power of two (``quantised/float8.py``)."""
EIGHT_BITS = "int8"
"""8-bit weights with a scale for every output."""
FEW_BITS = {EIGHT_BITS: 8, "int4": 4, ROUNDED_INPUTS: 8}
"""Types that round weights to this many bits. The result is another model; its own plain decoding is the reference.
Activations are bfloat16, or 8 bits for int4 on a CPU and for w8a8."""
STORED = "stored"
"""Matrices as the file stores them. On a CPU activations are rounded to 8 bits for every product with a quantised matrix, as in
llama.cpp. For F16 matrices they are rounded to 16 bits there, where the processor adds in 16 bits. On a GPU activations are
bfloat16, and a weight is rounded to it inside the product."""

EXACT = "stored-exact"
"""Matrices as the file stores them, on a CPU, and inputs that stay floats: scores are the bits of ``"float32"``."""


def computing_dtype(dtype: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """The type of the weights under the option ``dtype``, for a checkpoint that stores them as ``stored``."""
    return torch.bfloat16 if dtype in FEW_BITS else dtype_named(dtype) or auto_dtype(stored, device)


def dtype_named(name: str | None) -> torch.dtype | None:
    """The type called ``name``; None for "auto"."""
    if name is None or name == "auto":
        return None
    if name not in DTYPES:
        raise OptionError(f"unknown dtype {name!r}; {nearest(name, [*DTYPES, *FEW_BITS, STORED, EXACT, 'auto'])}")
    return DTYPES[name]


def auto_dtype(stored: str | None, device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, and on a CPU that is fast in it for bfloat16 checkpoints; float32 otherwise."""
    if device.type == "cuda":
        return torch.bfloat16
    keeps = device.type == "cpu" and stored == "bfloat16" and torch.bfloat16 in auto_types()
    return torch.bfloat16 if keeps else torch.float32
