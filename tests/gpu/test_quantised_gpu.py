"""Products with the matrices of quantised checkpoints through the ring (models/gpu/rounded.py): plain PyTorch's numbers."""

from __future__ import annotations

import pytest
import torch

from outrider.models.gpu.limits import can_ring

pytestmark = pytest.mark.skipif(not can_ring(128, 128, torch.bfloat16), reason="needs a Hopper GPU and triton 3.6")
FORMS = ["nibbles", "nibbles-zeros", "nibbles-wide-scales", "bytes-groups", "floats", "floats-groups"]


def matrix(form: str, outputs: int, depth: int):
    from outrider.models.packed import Packed

    draw = torch.Generator("cuda").manual_seed(depth)
    groups = 1 if form == "floats" else depth // 128
    scales = torch.rand(groups, outputs, generator=draw, device="cuda") * 0.01 + 0.005
    if form.startswith("nibbles"):
        data = torch.randint(0, 256, (outputs, depth // 2), generator=draw, device="cuda", dtype=torch.uint8)
        zeros = torch.randint(-8, 8, (groups, outputs), generator=draw, device="cuda").bfloat16() if "zeros" in form else None
        return Packed(data, scales if "wide" in form else scales.half(), zeros)
    numbers = torch.randn(outputs, depth, generator=draw, device="cuda") * 20
    if form == "bytes-groups":
        return Packed(numbers.round().to(torch.int8), scales.bfloat16())
    return Packed(numbers.to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("depth", "num_parts", "gated"), [(384, 1, True), (640, 3, False), (2048, 1, False)])
def test_every_number_of_rows_gives_the_same_numbers(form: str, depth: int, num_parts: int, gated: bool) -> None:
    from outrider.models.gpu.skinny import Tile, product, reference_product

    packed = matrix(form, 256, depth)
    x = torch.randn(130, depth, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    expected = reference_product(x, packed.unpacked(torch.float32), gated=gated)
    first = None
    for num_rows, bm, bn, num_warps in [(1, 8, 64, 4), (9, 16, 64, 4), (20, 32, 64, 4), (64, 64, 128, 8), (130, 64, 64, 4)]:
        tile = Tile(bn, 256 if bm < 64 else 128, num_warps, 3, bm, num_parts, ringed=True)
        y = product(x[:num_rows], packed, tile=tile, gated=gated)
        first = y[..., :1, :].clone() if first is None else first
        assert torch.equal(y[..., :1, :], first), num_rows
        y = (y.sum(0) if num_parts > 1 else y).float()
        assert float((y - expected[:num_rows]).norm() / expected[:num_rows].norm()) < 5e-3, num_rows


def test_every_e4m3_float_is_the_number_it_stands_for() -> None:
    """All of them but NaN, one by one: inputs of which one is 1 and the others 0 bring them to light."""
    from outrider.models.gpu.skinny import Tile, product
    from outrider.models.packed import Packed

    place = torch.arange(128, device="cuda")
    codes = (place[:, None] * 2 + place[None, :] * 3).to(torch.uint8)
    codes = torch.where(codes & 127 == 127, codes - 1, codes).to(torch.uint8).contiguous().view(torch.float8_e4m3fn)
    packed = Packed(codes, torch.ones(1, 128, device="cuda"))
    x = torch.eye(128, device="cuda").bfloat16()
    y = torch.cat([product(part, packed, tile=Tile(64, 128, 4, 3, 64, ringed=True)) for part in x.split(64)])
    assert torch.equal(y.T.float(), codes.float())


@pytest.mark.parametrize("form", FORMS)
def test_numbers_written_out_in_16_bits(form: str) -> None:
    from outrider.models.gpu.grouped import sixteen_bits

    packed = matrix(form, 200, 640)
    assert torch.equal(sixteen_bits(packed, torch.bfloat16), packed.unpacked(torch.bfloat16))
