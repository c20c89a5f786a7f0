"""``dtype="w8a8"`` on a CUDA device: products of e4m3 floats are plain PyTorch's, and methods have plain decoding's text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device that multiplies e4m3 floats", allow_module_level=True)

from invariance import assert_nodes_score_as_their_paths, assert_scores_do_not_depend_on_the_pass

from outrider import LLM, SamplingParams
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.float8_matmul import rounded_rows
from outrider.models.gpu.products import multiply
from outrider.models.gpu.small_batch_matmul import reference_product
from outrider.models.gpu.tiles import Kind
from outrider.models.packed import Packed
from outrider.models.quantised.float8 import pack_floats, round_inputs

PARAMS = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, seed=7)]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("draft-model", {"num_draft_tokens": 3}),
    ("suffix", {"num_draft_tokens": 6}),
    ("best-first", {"num_draft_tokens": 5, "num_tree_nodes": 31}),
]


def test_the_kernel_rounds_inputs_as_plain_pytorch_does() -> None:
    x = torch.randn(40, 4096, device="cuda") * torch.logspace(-6, 6, 40, device="cuda")[:, None]
    x[3, 128:256], x[4, 7] = 0, 448.0
    for dtype in (torch.bfloat16, torch.float16):
        codes, steps = rounded_rows(x.clamp(-6e4, 6e4).to(dtype))
        wanted, wanted_steps = round_inputs(x.clamp(-6e4, 6e4).to(dtype))
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        there = wanted.float().unflatten(-1, (-1, 128)).abs().amax(-1) > 0
        assert torch.equal(steps.T[there], wanted_steps[there])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_every_number_of_rows_gives_the_same_numbers(kind: Kind, grouped: bool) -> None:
    """Those of plain PyTorch to the rounding of the tensor cores' sums, and bit for bit those of one row."""
    draw, gated = torch.Generator("cuda").manual_seed(3), kind is Kind.GATED
    packed = pack_floats(torch.randn(1536, 2048, generator=draw, device="cuda") / 8)
    scales = torch.rand(16, 1536, generator=draw, device="cuda") * 0.01 + 0.005 if grouped else packed.scales
    packed = Packed(packed.data, scales, rounds_inputs=True)
    x = torch.randn(400, 2048, generator=draw, device="cuda").bfloat16()
    codes, steps = round_inputs(x)
    rounded = codes.float() * steps.repeat_interleave(128, -1)
    expected = reference_product(rounded, packed.unpacked(torch.float32), gated=gated)
    first = None
    for count in (1, 2, 16, 17, 40, 64, 65, 200, 400):
        y = multiply(x[:count], packed, kind)
        first = y[..., :1, :].clone() if first is None else first
        assert (y[..., :1, :] == first).all(), count
        y = (y.sum(0) if y.dim() == 3 else y).float()
        assert float((y - expected[:count]).norm() / expected[:count].norm()) < 5e-3, count


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cuda", dtype="w8a8")


def test_nodes_score_as_their_paths(llm: LLM) -> None:
    target = llm.target
    assert isinstance(target, FastDecoder) and target.traits.is_invariant
    matrix = target.weights.layers[0].down
    assert isinstance(matrix, Packed) and matrix.rounds_inputs
    assert_nodes_score_as_their_paths(target, 70, num_nodes=48, every=5)
    assert_scores_do_not_depend_on_the_pass(target, 100)


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_texts_are_those_of_plain_decoding(llm: LLM, name: str, options: dict[str, Any]) -> None:
    prompts = ["Once upon a time", "Tom and Lily went to the park. Tom and Lily"]
    for params in PARAMS:
        plain = [output.token_ids for output in llm.generate(prompts, params, method=llm.compose("plain"))]
        found = [output.token_ids for output in llm.generate(prompts, params, method=llm.compose(name, **options))]
        assert found == plain
