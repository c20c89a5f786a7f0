"""Number of tokens of each prompt that a pass reads.

Kernels are launched one by one here, so short passes wait for the host. Long passes leave more partial results of attention. On
an H200 and 8B shapes 1,024 tokens are read faster than 2,048 (``benchmarks/gpu_kernels.py``).
"""

from __future__ import annotations

_MOST_PLACES = 65_535
"""Most rows times tokens of a pass. Kernels count them in a grid dimension that CUDA limits to this size."""
_LEAST = 512
"""Fewest tokens of each prompt, where there are several."""


def chunk_for(num_rows: int, chunk_len: int) -> int:
    """Tokens of each of so many prompts; ``chunk_len`` is the number for a single one."""
    num_rows = max(1, num_rows)
    return max(1, min(_MOST_PLACES // num_rows, max(_LEAST, chunk_len // num_rows)))
