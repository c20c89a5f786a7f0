"""How many tokens of each prompt a pass reads.

Kernels are launched one by one here, so short passes wait for the host; long ones leave more unfinished sums of attention. On
an H200 and 8B shapes 1,024 tokens are read faster than 2,048 (``benchmarks/gpu_kernels.py``).
"""

from __future__ import annotations

_MOST_PLACES = 65_535
"""Rows times tokens of a pass: kernels count them in a dimension of the grid that CUDA keeps this small."""
_LEAST = 512
"""Tokens of each prompt, where there are several."""


def chunk_for(num_rows: int, chunk_len: int) -> int:
    """Tokens of each of so many prompts; ``chunk_len`` are those of a single one."""
    num_rows = max(1, num_rows)
    return max(1, min(_MOST_PLACES // num_rows, max(_LEAST, chunk_len // num_rows)))
