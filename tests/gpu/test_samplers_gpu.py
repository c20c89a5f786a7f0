"""Every sampling parameter on a CUDA device with the default numerics: the same text as plain decoding and the host's sampler.

make gpu-test        (or: PYTHONPATH=src python -m pytest tests/gpu)
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core.device_sampling import stages_for
from outrider.core.request import Request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = ["Once upon a time", "Tom and Lily went to the park. Tom and Lily", "One day, a girl named Mia found", "The old man"]
METHODS = [
    ("plain", {}),
    ("draft-model", {"num_draft_tokens": 4}),
    ("best-first", {"num_draft_tokens": 4, "num_tree_nodes": 15}),
    ("draft-tree", {"branching": (3, 2, 1), "num_draft_tokens": 3, "num_tree_nodes": 15}),
]
IN_TURNS = ["draft-tree", "rsd-s", "spectr", "prompt-lookup", "token-recycling", "suffix"]
"""Methods of which each set of samplers is tried with two, as their rows compose them."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cuda")  # numerics are left to the default


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(name: str, *values: Any) -> dict[str, Any]:
        return {name: rng.choice(values)} if rng.random() < 0.4 else {}

    return SamplingParams(
        max_tokens=rng.randint(8, 32),
        seed=rng.randrange(10_000),
        temperature=rng.choice((0.0, 0.5, 0.8, 1.0, 1.3)),
        **maybe("top_k", 1, 10, 50, 400),
        **maybe("top_p", 0.3, 0.8, 0.95),
        **maybe("min_p", 0.02, 0.1),
        **maybe("typical_p", 0.5, 0.9),
        **maybe("repetition_penalty", 1.1, 1.5, 0.9),
        **maybe("presence_penalty", 0.5, -0.5),
        **maybe("frequency_penalty", 0.3, -0.2),
        **maybe("logit_bias", {40: 4.0, 50: -3.0}, {60: float("-inf")}),
        **maybe("banned_token_ids", (300, 301, 302)),
        **maybe("min_tokens", 6, 20),
    )


@pytest.mark.parametrize("seed", range(50))
def test_two_hundred_random_samplers_say_what_the_host_says(llm: LLM, seed: int) -> None:
    """Four requests with four sets of parameters share the rounds. ``trace`` asks for the host."""
    rng = random.Random(seed)
    params = [random_params(rng) for _ in PROMPTS]
    assert stages_for([Request([1, 2], one) for one in params]) is not None
    expected = [o.token_ids for o in llm.generate(PROMPTS, params, method=llm.compose("plain"), trace=True)]
    in_turns = [(IN_TURNS[(2 * seed + i) % len(IN_TURNS)], dict[str, Any]()) for i in range(2)]
    for name, options in (*(METHODS if seed < 10 else METHODS[:3]), *in_turns):
        got = llm.generate(PROMPTS, params, method=llm.compose(name, **options))
        assert [o.token_ids for o in got] == expected, (name, params)
        assert all(o.is_invariant for o in got), "the default promises these bits"


@pytest.mark.parametrize(("name", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_logprobs_in_captured_rounds_are_those_of_the_host(llm: LLM, name: str, options: dict[str, Any]) -> None:
    params = [
        SamplingParams(max_tokens=20, logprobs=3),
        SamplingParams(max_tokens=20, logprobs=0, temperature=0.8, seed=3, top_p=0.9),
        SamplingParams(max_tokens=20, temperature=0.5, seed=1, repetition_penalty=1.3, logprobs=20),
        SamplingParams(max_tokens=20),
    ]
    expected = llm.generate(PROMPTS, params, method=llm.compose("plain"), trace=True)
    got = llm.generate(PROMPTS, params, method=llm.compose(name, **options))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert one.token == other.token and abs(one.logprob - other.logprob) < 1e-4
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
