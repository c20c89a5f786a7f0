"""Prompts that arrive alone and are read by captured rounds: the same texts as with prompts read on the host.

make gpu-test        (or: PYTHONPATH=src python -m pytest tests/gpu)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.engine.device_lane import DeviceLane

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STORY = "Once upon a time there was a little girl named Lily who lived in a small house near the park with her dog Tom. "
PROMPTS = ["Once", "Once upon a time", 2 * STORY, 9 * STORY + "One day", 40 * STORY + "Then"]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("draft-model", {"num_draft_tokens": 3}),
    ("prompt-lookup", {}),
    ("suffix", {}),
    ("best-first", {}),
    ("eagle3", {}),
    ("medusa", {}),
]


@pytest.mark.parametrize(("name", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_a_prompt_that_arrives_alone_is_read_by_captured_rounds(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(device="cuda", numerics="invariant")
    params = [SamplingParams(max_tokens=24, temperature=0.8 * (n % 2), top_p=0.9, seed=n) for n in range(len(PROMPTS))]
    expected = [o.token_ids for o in llm.generate(PROMPTS, params, method=llm.compose("plain"), trace=True)]
    taken, real = list[int](), DeviceLane.reads

    def counted(self: DeviceLane, number: int, state: Any, prefix: Any, *, is_alone: bool) -> bool:
        found = real(self, number, state, prefix, is_alone=is_alone)
        taken.append(len(state.tokens) if found else 0)
        return found

    monkeypatch.setattr(DeviceLane, "reads", counted)
    method = llm.compose(name, **options)
    texts = [llm.generate(prompt, one, method=method)[0].token_ids for prompt, one in zip(PROMPTS, params, strict=True)]
    assert texts == expected
    assert sum(map(bool, taken)) >= 3, "short prompts of two tokens and more"
