"""A draft at work beside the target on one device: its thread replays graphs and leaves capturing to the engine's.

make gpu-test        (or: PYTHONPATH=src python -m pytest tests/gpu)
"""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = ["Once upon a time", "The dog was", "Lily and Tom went to the park. They"]


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_text_is_that_of_plain_decoding(policy: str, temperature: float) -> None:
    llm = LLM(device="cuda", numerics="invariant")
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=n) for n in range(len(PROMPTS))]
    plain = [output.token_ids for output in llm.generate(PROMPTS, params, method=llm.compose("plain"))]
    method = llm.compose("pearl", policy=policy)
    for _ in range(2):  # captured in the first
        outputs = llm.generate(PROMPTS, params, method=method)
        assert [output.token_ids for output in outputs] == plain
    assert policy != "fixed" or sum(output.stats.num_drafted for output in outputs) > 0
