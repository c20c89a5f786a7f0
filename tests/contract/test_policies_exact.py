"""Whatever a policy decides, the text is that of plain decoding: greedy and seeded, alone and batched."""

from __future__ import annotations

import pytest
from test_methods import PROMPTS as MANY_PROMPTS
from test_methods import SAMPLED, serve, tokens
from tiny_pair import tiny_model

from outrider.core.params import SamplingParams
from outrider.methods import POLICIES, compose

PROMPTS = MANY_PROMPTS[:5]
GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def models():
    target, draft = tiny_model(), tiny_model(0.15)
    plain = compose("plain", target)
    return target, draft, {id(p): tokens(serve(target, plain, PROMPTS, p)) for p in (GREEDY, SAMPLED)}


@pytest.mark.parametrize(("params", "batch"), [(GREEDY, 3), (SAMPLED, 1)], ids=["greedy, batched", "seeded, alone"])
@pytest.mark.parametrize("method", ["draft-model", "prompt-lookup", "best-first", "hybrid", "cascade"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_text_is_that_of_plain_decoding(models, policy: str, method: str, params: SamplingParams, batch: int) -> None:
    target, draft, expected = models
    composed, count = compose(method, target, draft=draft, policy=policy), 2 if batch == 1 else 5
    assert tokens(serve(target, composed, PROMPTS[:count], params, batch=batch)) == expected[id(params)][:count]
