"""How many tokens of each prompt a pass of the GPU's decoder reads."""

from __future__ import annotations

import pytest

from outrider.models.gpu.chunks import chunk_for


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 1024), (1, 1024), (2, 512), (64, 512), (128, 511), (512, 127)])
def test_one_prompt_is_read_in_longer_passes_than_several(num_rows: int, expected: int) -> None:
    """The last two would be more places than a dimension of the grid holds."""
    assert chunk_for(num_rows, 1024) == expected
    assert num_rows * expected <= 65_535
