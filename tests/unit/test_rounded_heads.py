"""Heads of few bits: less memory, the same text, and guesses that are still accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_heads import TARGET
from test_methods import PROMPTS, serve, tokens
from tiny_heads import CHANGES, random_head, random_heads

from outrider.api import LLM
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.methods import compose
from outrider.models.heads.frozen import RoundedHeadLinear, quicken

PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=4)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(serve(TARGET, compose("plain", TARGET), PROMPTS[:4], PARAMS))


@pytest.mark.parametrize("kind", list(CHANGES))
def test_the_text_stays(kind: str, expected: list[list[int]], tmp_path: Path) -> None:
    method = compose(kind, TARGET, options={"heads": random_heads(kind, tmp_path), "bits": 8})
    assert tokens(serve(TARGET, method, PROMPTS[:4], PARAMS, batch=3)) == expected


@pytest.mark.parametrize(("bits", "most"), [(8, 0.26), (4, 0.14)])
def test_matrices_take_fewer_bytes_and_are_near(bits: int, most: float) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 96)
    rounded, x = RoundedHeadLinear(linear, bits), torch.randn(5, 256)
    assert rounded.packed.bits == bits and rounded.packed.nbytes < most * linear.weight.nbytes
    with torch.no_grad():
        error = (rounded(x) - linear(x)).norm() / linear(x).norm()
    assert 0 < float(error) < (0.01 if bits == 8 else 0.15)


def test_all_matrices_of_heads_are_rounded() -> None:
    head = random_head("dspark")
    count = len([module for module in head.modules() if isinstance(module, torch.nn.Linear)])
    quicken(head, 8)
    assert not [module for module in head.modules() if isinstance(module, torch.nn.Linear)]
    assert len([module for module in head.modules() if isinstance(module, RoundedHeadLinear)]) == count


def test_bundled_heads_of_eight_bits_are_accepted_as_the_whole_ones() -> None:
    llm = LLM(method="plain", dtype="float32")
    prompt, params = "Once upon a time, there was a little girl named Lily. She", SamplingParams(max_tokens=40)
    plain = llm.generate([prompt], params)[0].token_ids
    passes = []
    for bits in (16, 8):
        output = llm.generate([prompt], params, method=llm.compose("eagle3", bits=bits, num_draft_tokens=4))[0]
        assert output.token_ids == plain
        passes.append(output.stats.num_passes)
    assert passes[1] <= passes[0] + 2 < len(plain)


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(OptionError, match="use 16, 8 or 4"):
        LLM(method="eagle3", bits=6)
