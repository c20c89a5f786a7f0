"""What the device allows: tiles measured on a large GPU are cut to the shared memory of a small one.

A tile keeps ``num_stages`` copies of its operands in flight. Fewer copies hide less of the memory's latency, and change no
number.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_RESERVE = 2048
"""Bytes a kernel may need beside its operands."""


@lru_cache
def shared_memory() -> int:
    """Bytes of shared memory a program may take; without a GPU (interpreted kernels) as much as it likes."""
    if not torch.cuda.is_available():
        return 1 << 30
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin)


def stages_that_fit(num_stages: int, stage_bytes: int, *, other_bytes: int = 0, limit: int | None = None) -> int:
    """Of ``num_stages`` copies of ``stage_bytes``, as many as fit beside ``other_bytes``; at least one."""
    room = (shared_memory() if limit is None else limit) - _RESERVE - other_bytes
    return max(1, min(num_stages, room // stage_bytes))
