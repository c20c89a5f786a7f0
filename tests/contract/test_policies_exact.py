"""Whatever a policy decides, the text is that of plain decoding: greedy and seeded, alone and batched."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from test_methods import PROMPTS as MANY_PROMPTS
from test_methods import SAMPLED, serve, tokens
from tiny_pair import tiny_model

from outrider.core.params import SamplingParams
from outrider.methods import POLICIES, compose

PROMPTS = MANY_PROMPTS[:5]
GREEDY = SamplingParams(max_tokens=16)
METHODS = ["draft-model", "prompt-lookup", "best-first", "hybrid", "cascade"]


@pytest.fixture(scope="module")
def models():
    target, draft = tiny_model(), tiny_model(0.15)
    plain = compose("plain", target)
    return target, draft, {id(p): tokens(serve(target, plain, PROMPTS, p)) for p in (GREEDY, SAMPLED)}


def tiered() -> list[Any]:
    """Every policy with every method. ``make test`` has two a policy, in turn: one greedy in a batch, one seeded alone."""
    found = []
    for (turn, policy), (place, method) in itertools.product(enumerate(POLICIES), enumerate(METHODS)):
        for shift, params, batch, way in ((0, SAMPLED, 1, "seeded, alone"), (2, GREEDY, 3, "greedy, batched")):
            marks = () if (turn + shift) % len(METHODS) == place else pytest.mark.exhaustive
            found.append(pytest.param(policy, method, params, batch, id=f"{policy}-{method}-{way}", marks=marks))
    return found


@pytest.mark.parametrize(("policy", "method", "params", "batch"), tiered())
def test_the_text_is_that_of_plain_decoding(models, policy: str, method: str, params: SamplingParams, batch: int) -> None:
    target, draft, expected = models
    composed, count = compose(method, target, draft=draft, policy=policy), 2 if batch == 1 else 5
    assert tokens(serve(target, composed, PROMPTS[:count], params, batch=batch)) == expected[id(params)][:count]
