"""Grammars in captured rounds on a CUDA device: the text of the host for the same seed, with every shape of draft."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core.device_sampling import stages_for
from outrider.core.request import Request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = ["Once upon a time", "Tom and Lily went to the park. Tom and Lily", "One day, a girl named Mia found", "The old man"]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("draft-model", {"num_draft_tokens": 4}),
    ("prompt-lookup", {"num_draft_tokens": 4}),
    ("best-first", {"num_draft_tokens": 4, "num_tree_nodes": 15}),
    ("draft-tree", {"branching": (3, 2, 1), "num_draft_tokens": 3, "num_tree_nodes": 15}),
    ("eagle3", {"num_draft_tokens": 4, "num_tree_nodes": 15}),
    ("medusa", {"num_draft_tokens": 4, "num_tree_nodes": 15}),
]


class Turns:
    """A grammar: three tokens of a third of the vocabulary each, then two tokens that are forced."""

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return (state + 1) % 5 if self.allowed(state, token + 1)[token] else None

    def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
        tokens = torch.arange(vocab_size)
        return tokens == 100 + state if state >= 3 else tokens % 3 == state

    def forced(self, state: int) -> tuple[int, ...]:
        return (103, 104)[state - 3 :] if state >= 3 else ()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cuda", numerics="invariant")


def params_of(grammar: Any) -> list[SamplingParams]:
    """Grammars beside requests without one, greedy and drawn, with penalties and logprobs."""
    return [
        SamplingParams(max_tokens=40, grammar=grammar),
        SamplingParams(max_tokens=30, grammar=grammar, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2),
        SamplingParams(max_tokens=35),
        SamplingParams(max_tokens=25, grammar=grammar, temperature=1.0, seed=5, logprobs=3),
    ]


@pytest.mark.parametrize(("name", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_grammars_in_captured_rounds_say_what_the_host_says(llm: LLM, name: str, options: dict[str, Any]) -> None:
    params = params_of(Turns())
    assert stages_for([Request([1, 2], one) for one in params]) is not None
    expected = llm.generate(PROMPTS, params, method=llm.compose("plain"), trace=True)
    method = llm.compose(name, **options)
    got = llm.generate(PROMPTS, params, method=method)
    assert [o.token_ids for o in got] == [o.token_ids for o in expected]
    assert [llm.generate(p, q, method=method)[0].token_ids for p, q in zip(PROMPTS, params, strict=True)] == [
        o.token_ids for o in expected
    ]
    for one, other in zip(got[3].logprobs or [], expected[3].logprobs or [], strict=True):
        assert one.token == other.token and abs(one.logprob - other.logprob) < 1e-4
    if name != "plain":
        assert got[0].stats.num_accepted >= 12, "forced text is drafted"


def test_more_grammars_than_slots_and_prompts_read_inside_rounds(llm: LLM) -> None:
    words = llm.codec.encode(" ".join(PROMPTS) + " ") * 6
    prompts = [words[start : start + size] for start, size in enumerate((2, 120, 33, 65, 7, 90))]
    params = [SamplingParams(max_tokens=9 + 4 * n, grammar=Turns() if n % 2 else None) for n in range(len(prompts))]
    plain = llm.compose("plain")
    expected = [llm.generate(p, q, method=plain, trace=True)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    llm.max_batch_size, old = 2, llm.max_batch_size
    try:
        got = llm.generate(prompts, params, method=llm.compose("draft-model", num_draft_tokens=4))
    finally:
        llm.max_batch_size = old
    assert [o.token_ids for o in got] == expected


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed")
@pytest.mark.parametrize(("name", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_json_in_captured_rounds_is_that_of_the_host(llm: LLM, name: str, options: dict[str, Any]) -> None:
    fields = {"name": {"type": "string", "maxLength": 12}, "colour": {"enum": ["red", "green"]}}
    schema = {"type": "object", "properties": fields, "required": ["name", "colour"], "additionalProperties": False}
    params = params_of(llm.grammar(json_schema=schema))
    expected = llm.generate(PROMPTS, params, method=llm.compose("plain"), trace=True)
    got = llm.generate(PROMPTS, params, method=llm.compose(name, **options))
    assert [o.text for o in got] == [o.text for o in expected]
