"""benchmarks/random_exactness.py in a small, fixed size: random models are equal or refused, random samplers change nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider import LLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_exactness


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "cohere", "olmo2", "gptj", "starcoder2"])
def test_a_random_model_is_equal_to_generate(kind: str) -> None:
    assert random_exactness.try_model(kind, seed=0) == "equal"


@pytest.mark.parametrize(("kind", "reason"), [("bloom", "ALiBi"), ("mamba", "cannot score trees")])
def test_a_random_model_that_cannot_be_used_is_refused(kind: str, reason: str) -> None:
    outcome = random_exactness.try_model(kind, seed=0)
    assert outcome.startswith("refused: ") and reason in outcome


def test_a_difference_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_exactness, "generated", lambda model: [[1] * random_exactness.NUM_TOKENS] * 3)
    assert random_exactness.try_model("gpt2", seed=0).startswith("DIFFERENT")


def test_random_samplers_write_the_text_of_plain_decoding() -> None:
    different = random_exactness.try_samplers(LLM(dtype="float32"), 2)
    assert set(different) == set(random_exactness.SAMPLER_METHODS) and not any(different.values())
