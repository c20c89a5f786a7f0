"""Products of 8 and 4 bits (models/gpu/quantised_matmul.py) against plain PyTorch, and rows against each other."""

from __future__ import annotations

import pytest
import torch
from rows_alike import assert_rows_alike

from outrider.models.gpu.limits import can_ring

pytestmark = pytest.mark.skipif(not can_ring(128, 128, torch.bfloat16), reason="needs a Hopper GPU and triton 3.6")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("depth", "num_parts", "gated"), [(384, 1, True), (640, 3, False), (256, 4, False), (2048, 1, False)])
def test_every_number_of_rows_gives_the_same_numbers(bits: int, depth: int, num_parts: int, gated: bool) -> None:
    """Those of plain PyTorch to rounding, and bit for bit those of one row; groups that are not there add nothing."""
    from outrider.models.gpu.small_batch_matmul import reference_product
    from outrider.models.packed import pack

    draw = torch.Generator("cuda").manual_seed(depth)
    packed = pack(torch.randn(256, depth, generator=draw, device="cuda").bfloat16() / 8, bits)
    x = torch.randn(130, depth, generator=draw, device="cuda").bfloat16()
    expected = reference_product(x, packed.unpacked(), gated=gated)
    assert_rows_alike(x, packed, expected, num_parts=num_parts, gated=gated)


@pytest.mark.parametrize("bits", [8, 4])
def test_every_byte_is_the_number_it_stands_for(bits: int) -> None:
    """All 256 bytes, one by one: inputs of which one is 1 and the others 0 bring them to light."""
    from outrider.models.gpu.small_batch_matmul import Tile, product
    from outrider.models.packed import Packed

    width = 128 * bits // 8
    row = torch.arange(width, device="cuda")
    data = torch.stack([row.roll(index) + index * width % 256 for index in range(128)]).to(torch.uint8)
    assert data.unique().numel() == 256
    data = data.view(torch.int8) if bits == 8 else data
    packed = Packed(data.contiguous(), torch.ones(1, 128, dtype=torch.bfloat16, device="cuda"))
    x = torch.eye(128, device="cuda").bfloat16()
    y = torch.cat([product(part, packed, tile=Tile(64, 128, 4, 3, 64, ringed=True)) for part in x.split(64)])
    assert torch.equal(y.T.float(), packed.integers().float())
