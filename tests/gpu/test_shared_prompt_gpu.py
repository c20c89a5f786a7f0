"""A system prompt that many requests share, inside captured rounds: later requests borrow its pages.

make gpu-test        (or: PYTHONPATH=src python -m pytest tests/gpu)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cache.prefixes import PageStore, prefix_tree
from outrider.core.request import RequestState
from outrider.engine.job import Job, Slots
from outrider.engine.scheduler import Scheduler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STORY = "Once upon a time there was a little girl named Lily who lived in a small house near the park with her dog Tom. "
ENDS = ["One day she", "Tom was", "The sun", "They saw a", "Her mom said", "It was", "A big", "Then Lily", "The dog"]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("draft-model", {"num_draft_tokens": 3}),
    ("prompt-lookup", {"num_draft_tokens": 4}),
    ("best-first", {}),
]


@pytest.mark.parametrize(("name", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_requests_that_borrow_pages_say_what_they_say_alone(name: str, options: dict[str, Any]) -> None:
    """As a server runs them: they come while others run, wait for seats, and leave."""
    llm = LLM(device="cuda", numerics="invariant", page_len=16)
    method = llm.compose(name, **options)
    prompts = [4 * STORY + end for end in ENDS]
    params = [SamplingParams(max_tokens=20 + 7 * (n % 4), temperature=0.7 * (n % 2), seed=n) for n in range(len(prompts))]
    plain = llm.compose("plain")
    expected = [llm.generate(prompt, one, method=plain)[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    store = prefix_tree(llm.target.new_cache(1), 1 << 30)
    assert isinstance(store, PageStore)
    scheduler = Scheduler(
        llm.target, lambda _: method, slots=Slots(4, 64), prefixes=store, isolates=False, device_lane=llm.rounds.lane
    )
    states = [RequestState.of(request) for request in llm.requests(prompts, params)]
    coming, num_rounds = list(enumerate(states)), 0
    while coming or not scheduler.is_idle:
        if coming and num_rounds % 5 == 0:
            number, state = coming.pop(0)
            scheduler.submit(Job(number, state))
        scheduler.round()
        num_rounds += 1
    shared = len(llm.codec.encode(4 * STORY)) - 2
    assert [state.output_ids for state in states] == expected
    assert store.num_hits >= len(prompts) - 2 and store.num_hit_tokens >= store.num_hits * shared
    scheduler.check_integrity()


def test_after_a_warm_up_no_sampler_waits_for_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.engine import captured_rounds

    llm = LLM(device="cuda", max_batch_size=4, numerics="invariant")
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"temperature": 0.8},
        "top-p": {"temperature": 0.8, "top_p": 0.9},
        "top-k": {"temperature": 0.8, "top_k": 20},
        "typical": {"temperature": 0.8, "typical_p": 0.9},
        "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1},
        "logprobs": {"logprobs": 3},
        "bias": {"logit_bias": {5: 2.0}},
        "grammar": {"grammar": _Even()},
    }
    params = {name: SamplingParams(max_tokens=24, seed=3, **more) for name, more in kinds.items()}
    plain = llm.compose("plain")
    expected = {name: [o.token_ids for o in llm.generate(ENDS, one, method=plain, trace=True)] for name, one in params.items()}
    llm.warm_up(batch_sizes=[1, 2, 4])
    captures: list[object] = []
    real = captured_rounds.RoundGraph

    def counted(*given: Any, **more: Any) -> Any:
        captures.append(given)
        return real(*given, **more)

    monkeypatch.setattr(captured_rounds, "RoundGraph", counted)
    for name, one in params.items():
        found = [output.token_ids for output in llm.generate(ENDS, one)]
        assert not captures, f"{name}: {len(captures)} rounds were captured"
        assert found == expected[name], name


class _Even:
    """A grammar: tokens of even numbers."""

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return None if token % 2 else state

    def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
        del state
        return torch.arange(vocab_size) % 2 == 0

    def forced(self, state: int) -> tuple[int, ...]:
        del state
        return ()
