"""GGUF matrices as stored on a GPU: every storage type against its numbers in 16 bits, and a file opened as stored.

PYTHONPATH=src python -m pytest tests/gpu/test_gguf_planes_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_numbers(tmp_path: Path, kind: str) -> None:
    """One row to many, and a row's bits do not depend on the others."""
    from quantised_blocks import quantised
    from test_gguf import write_gguf

    from outrider.models.gguf import read_gguf
    from outrider.models.gpu.products import multiply, sixteen_bits
    from outrider.models.gpu.small_batch_matmul import reference_product
    from outrider.models.gpu.tiles import Kind
    from outrider.models.quantised.gguf_planes import planes_of

    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(520, 1280, generator=draw) / 8
    file = read_gguf(write_gguf(tmp_path / "one.gguf", {}, {"m.weight": quantised(weights, kind)}))
    planes = planes_of(file.rows("m.weight").cuda(), file.tensors["m.weight"])
    wanted = file.tensor("m.weight").cuda()
    torch.testing.assert_close(sixteen_bits(planes, torch.bfloat16), wanted.bfloat16(), atol=0, rtol=2**-7)
    x = torch.randn(200, 1280, generator=draw).bfloat16().cuda()
    for matrix_kind in Kind:
        expected, lone = reference_product(x, wanted, gated=matrix_kind is Kind.GATED), None
        for count, exact in ((1, False), (8, False), (16, False), (33, False), (64, False), (200, True), (200, False)):
            y = multiply(x[:count], planes, matrix_kind, exact=exact)
            y = (y.sum(0) if y.dim() == 3 else y).float()
            assert (y - expected[:count]).norm() < 0.01 * expected[:count].norm()
            lone = y[:1].clone() if lone is None else lone
            assert torch.equal(y[:1], lone) or (count == 200 and not exact)


def test_a_file_opens_as_stored(tmp_path: Path) -> None:
    """Near its dequantised twin, speculative text is plain text in invariant numerics, and memory is that of the file."""
    from test_stored_gguf import Q4_K_M, model_file

    from outrider import LLM, SamplingParams
    from outrider.core.tree import TokenTree
    from outrider.models.load import load_model

    path = model_file(tmp_path, Q4_K_M)
    stored, wide = (load_model(str(path), dtype=dtype, device="cuda") for dtype in ("stored", "bfloat16"))
    tree = TokenTree.of_rows([([5, 6, 7], [-1, 0, 0])], torch.device("cuda"))
    found, wanted = (model.score(tree, model.new_cache(1)).logits for model in (stored, wide))
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    llm = LLM(str(path), dtype="stored", device="cuda", numerics="invariant", method="prompt-lookup")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    texts = [
        llm.generate([[1, 2, 3, 1, 2]], params, method=llm.compose(name))[0].token_ids for name in ("plain", "prompt-lookup")
    ]
    assert texts[0] == texts[1]
