"""Products with the matrices of quantised checkpoints (models/gpu/quantised_matmul.py) are plain PyTorch's."""

from __future__ import annotations

import pytest
import torch
from rows_alike import assert_rows_alike

from outrider.models.gpu.limits import can_ring

pytestmark = pytest.mark.skipif(not can_ring(128, 128, torch.bfloat16), reason="needs a Hopper GPU and triton 3.6")
FORMS = ["nibbles", "nibbles-zeros", "nibbles-wide-scales", "bytes-groups", "floats", "floats-groups"]
FORMS += ["nibbles-zeros-short", "nibbles-places-short"]


def matrix(form: str, outputs: int, depth: int):
    from outrider.models.packed import Packed

    draw = torch.Generator("cuda").manual_seed(depth)
    groups = 1 if form == "floats" else depth // (64 if "short" in form else 128)
    scales = torch.rand(groups, outputs, generator=draw, device="cuda") * 0.01 + 0.005
    if form.startswith("nibbles"):
        data = torch.randint(0, 256, (outputs, depth // 2), generator=draw, device="cuda", dtype=torch.uint8)
        zeros = torch.randint(-8, 8, (groups, outputs), generator=draw, device="cuda").bfloat16() if "zeros" in form else None
        levels = torch.linspace(-1, 1, 16, device="cuda") if "places" in form else None
        return Packed(data, scales if "wide" in form else scales.half(), zeros, levels)
    numbers = torch.randn(outputs, depth, generator=draw, device="cuda") * 20
    if form == "bytes-groups":
        return Packed(numbers.round().to(torch.int8), scales.bfloat16())
    return Packed(numbers.to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("depth", "num_parts", "gated"), [(384, 1, True), (640, 3, False), (2048, 1, False)])
def test_every_number_of_rows_gives_the_same_numbers(form: str, depth: int, num_parts: int, gated: bool) -> None:
    from outrider.models.gpu.small_batch_matmul import reference_product

    packed = matrix(form, 256, depth)
    x = torch.randn(130, depth, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    expected = reference_product(x, packed.unpacked(torch.float32), gated=gated)
    assert_rows_alike(x, packed, expected, num_parts=num_parts, gated=gated)


def test_every_e4m3_float_is_the_number_it_stands_for() -> None:
    """All of them but NaN, one by one: inputs of which one is 1 and the others 0 bring them to light."""
    from outrider.models.gpu.small_batch_matmul import Tile, product
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
    from outrider.models.gpu.products import sixteen_bits

    packed = matrix(form, 200, 640)
    assert torch.equal(sixteen_bits(packed, torch.bfloat16), packed.unpacked(torch.bfloat16))


@pytest.mark.parametrize(("depth", "num_parts", "gated"), [(384, 1, True), (640, 2, False), (2048, 1, False)])
def test_places_in_a_table_are_multiplied_as_they_are(depth: int, num_parts: int, gated: bool) -> None:
    """nf4: groups of 64 with scales of 32 bits, from one row to more than our kernels take."""
    from outrider.models.gpu.products import multiply, sixteen_bits
    from outrider.models.gpu.small_batch_matmul import Tile, product, reference_product
    from outrider.models.gpu.tiles import Kind
    from outrider.models.packed import Packed

    draw = torch.Generator("cuda").manual_seed(depth)
    data = torch.randint(0, 256, (256, depth // 2), generator=draw, device="cuda", dtype=torch.uint8)
    scales = torch.rand(depth // 64, 256, generator=draw, device="cuda") + 0.5
    packed = Packed(data, scales, levels=torch.randn(16, generator=draw, device="cuda").sort().values)
    x = torch.randn(130, depth, generator=draw, device="cuda").bfloat16()
    expected, first = reference_product(x, packed.unpacked(torch.float32), gated=gated), None
    for num_rows, bm in ((1, 16), (9, 16), (64, 64)):
        y = product(x[:num_rows], packed, tile=Tile(64, 128, bm=bm, num_parts=num_parts), gated=gated)
        y = (y.sum(0) if num_parts > 1 else y).float()
        assert float((y - expected[:num_rows]).norm() / expected[:num_rows].norm()) < 6e-3, num_rows
        first = y[:1].clone() if first is None else first
        assert float((y[:1] - first).norm() / first.norm()) < 1e-2
    assert torch.equal(sixteen_bits(packed, torch.bfloat16), packed.unpacked(torch.bfloat16))
    y = multiply(x, packed, Kind.GATED if gated else Kind.WIDE).float()
    assert float((y - expected).norm() / expected.norm()) < 6e-3


def test_every_e2m1_float_of_an_expert_is_the_number_it_stands_for() -> None:
    """All codes with several powers of two: inputs of which one is 1 and the others 0 bring them to light."""
    from outrider.models.gpu.expert_products import ExpertBlocks, expert_product
    from outrider.models.packed import Packed

    place = torch.arange(128, device="cuda")
    data = (place[:, None] * 5 + place[None, :64] * 7).to(torch.uint8)
    packed = Packed(data, (place[None, :] % 9 + 120 + place[:4, None]).to(torch.uint8))
    x, pairs = torch.eye(128, device="cuda").bfloat16(), torch.arange(128, device="cuda", dtype=torch.int32).view(8, 16)
    blocks = ExpertBlocks(torch.ones(128, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda"), pairs)
    out = torch.empty(1, 128, 128, device="cuda")
    expert_product(x, packed, None, out, blocks, per_row=1, activation=None)
    assert torch.equal(out[0].T, packed.unpacked(torch.float32))


@pytest.mark.parametrize("num_rows", [1, 8, 130])
def test_experts_in_mxfp4_add_what_their_numbers_add(num_rows: int) -> None:
    from dataclasses import replace

    from outrider.models.config import config_of
    from outrider.models.gpu.experts import experts_mlp
    from outrider.models.packed import LayerMatrices, Packed
    from outrider.models.random_decoder import random_weights

    raw = {"model_type": "gpt_oss", "hidden_size": 288, "intermediate_size": 320, "num_local_experts": 16, "vocab_size": 64}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
    config = config_of({**raw, "num_experts_per_tok": 4, "layer_types": ["full_attention"], "max_position_embeddings": 512})
    assert config is not None and config.experts is not None
    whole = random_weights(config, dtype=torch.bfloat16, device=torch.device("cuda")).layers[0]
    draw, packed = torch.Generator("cuda").manual_seed(5), dict[str, Packed]()
    for name in ("gate_up", "down"):
        num_outputs, depth = vars(whole)[name].flatten(0, 1).shape
        data = torch.randint(0, 256, (num_outputs, depth // 2), generator=draw, device="cuda", dtype=torch.uint8)
        scales = torch.randint(118, 122, (depth // 32, num_outputs), generator=draw, device="cuda", dtype=torch.uint8)
        packed[name] = Packed(data, scales)
    numbers = {name: found.unpacked(torch.bfloat16).view_as(vars(whole)[name]) for name, found in packed.items()}
    x = torch.randn(num_rows, 288, generator=draw, device="cuda").bfloat16()
    layers = (
        LayerMatrices(whole.qkv, whole.out, packed["gate_up"], packed["down"], whole),
        LayerMatrices(whole.qkv, whole.out, numbers["gate_up"], numbers["down"], replace(whole, **numbers)),
    )
    mine, theirs = (experts_mlp(x, layer, config.experts, activation=config.activation, exact=True).sum(0) for layer in layers)
    assert float((mine - theirs).norm() / theirs.norm()) < 5e-3


EXPERT_FORMS = [
    "gptq",
    "gptq-symmetric",
    "awq",
    "nf4",
    "int8-channel",
    "fp8-channel",
    "fp8-blocks",
    "Q8_0",
    "Q4_K",
    "Q5_1",
    "Q6_K",
]


@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_experts_of_few_bits_add_what_their_numbers_add(form: str) -> None:
    """One node, some and more than a block, each with the bits it has alone."""
    from dataclasses import replace

    from test_device_experts import in_form

    from outrider.models.config import config_of
    from outrider.models.gpu.experts import experts_mlp
    from outrider.models.packed import LayerMatrices
    from outrider.models.random_decoder import random_weights

    raw = {"model_type": "mixtral", "hidden_size": 256, "intermediate_size": 256, "num_local_experts": 4, "vocab_size": 64}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
    config = config_of({**raw, "num_experts_per_tok": 2, "max_position_embeddings": 512})
    assert config is not None and config.experts is not None
    whole = random_weights(config, dtype=torch.bfloat16, device=torch.device("cuda")).layers[0]
    packed = {name: in_form(form, vars(whole)[name]) for name in ("gate_up", "down")}
    numbers = {name: found.unpacked(torch.bfloat16).view_as(vars(whole)[name]) for name, found in packed.items()}
    layers = (
        LayerMatrices(whole.qkv, whole.out, packed["gate_up"], packed["down"], whole),
        LayerMatrices(whole.qkv, whole.out, numbers["gate_up"], numbers["down"], replace(whole, **numbers)),
    )
    x, alone = torch.randn(130, 256, device="cuda").bfloat16(), None
    for count in (1, 8, 130):
        options = {"activation": config.activation, "exact": True}
        mine, theirs = (experts_mlp(x[:count], layer, config.experts, **options).sum(0) for layer in layers)
        assert float((mine - theirs).norm() / theirs.norm()) < 8e-3
        alone = mine[:1] if alone is None else alone
        assert torch.equal(mine[:1], alone), count
