"""Limits of the device: tiles measured on a large GPU are reduced to fit the shared memory of a small one.

A tile keeps ``num_stages`` copies of its operands in flight. Fewer copies hide less of the memory's latency, and change no
number. Hopper and later have an engine that fetches tiles, so that threads need not.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.metadata import version

import torch
from torch import Tensor

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
"""Whether the instructions of Hopper and later are available; never for interpreted kernels."""
_IS_HOPPER = HOPPER and torch.cuda.get_device_capability()[0] == 9
_RESERVE = 2048
"""Bytes a kernel may need beside its operands."""


@lru_cache
def shared_memory() -> int:
    """Bytes of shared memory a program may take; without a GPU (interpreted kernels) as much as it likes."""
    if not torch.cuda.is_available():
        return 1 << 30
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin)


def can_copy(*operands: Tensor) -> bool:
    """Whether the copy engine of Hopper and later is available and takes such operands: 16 or 8 bits a number, rows of whole
    16 bytes."""
    fits = all(
        t.element_size() <= 2 and t.is_contiguous() and t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
        for t in operands
    )
    return HOPPER and fits and all(t.numel() // t.shape[-1] < 1 << 31 for t in operands)


def stages_that_fit(num_stages: int, stage_bytes: int, *, other_bytes: int = 0, limit: int | None = None) -> int:
    """Number of copies of ``stage_bytes``, at most ``num_stages``, that fit beside ``other_bytes``; at least one."""
    room = (shared_memory() if limit is None else limit) - _RESERVE - other_bytes
    return max(1, min(num_stages, room // stage_bytes))


@lru_cache
def _has_gluon() -> bool:
    """Whether triton has Gluon, in which attention of many queries and products of few bits are written."""
    return (3, 6) <= tuple(map(int, version("triton").split(".")[:2])) < (4, 0)


def can_ring(num_outputs: int, depth: int, dtype: torch.dtype) -> bool:
    """Whether few-bit products can use ``quantised_matmul.py``, which needs whole groups of inputs and whole output tiles."""
    return HOPPER and dtype == torch.bfloat16 and depth % 128 == 0 and num_outputs % 128 == 0 and _has_gluon()


def can_multiply_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether products of more than 64 rows can use ``wide.py``: it needs Hopper itself, its copy engine, and Gluon."""
    known = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return _IS_HOPPER and known and can_copy(x, weight) and _has_gluon()


def can_go_wide(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether attention's kernel for many queries is available (``attention/tree_wide.py``): it needs Hopper itself, and Gluon.
    ``OUTRIDER_WIDE_ATTENTION=0`` turns it off."""
    wanted = _IS_HOPPER and os.environ.get("OUTRIDER_WIDE_ATTENTION", "1") == "1"
    if not wanted or head_dim not in (64, 128) or dtype not in (torch.bfloat16, torch.float16):
        return False
    return _has_gluon()
