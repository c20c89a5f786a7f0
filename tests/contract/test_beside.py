"""Drafting beside verifying is drafting in turns at another time: the same rounds, with every row and rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_forced_rejection import SCHEDULES, Cut
from test_methods import EOS, PROMPTS
from tiers import in_turn
from tiny_pair import VOCAB, tiny_model
from toy_codecs import toy_translation

from outrider.core.choice import agrees
from outrider.core.errors import CompositionError
from outrider.core.interfaces import Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.drafters.beside import Beside
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import METHODS, RULES, compose

ROWS = [name for name, row in METHODS.items() if not row.drafter.waits]
SEEDED = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
COUNTED = SamplingParams(max_tokens=12, temperature=0.6, top_p=0.9, seed=5, repetition_penalty=1.2, min_tokens=6)
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_model()


@pytest.fixture(scope="module")
def draft() -> Target:
    return tiny_model(0.1)


def rules_in_turn() -> list[Any]:
    """Every row with every lossless rule; ``make test`` has one rule a row, in turn, and both rules of draft-model's kinds."""
    pairs: list[Any] = []
    for turn, name in enumerate(ROWS):
        fitting = [rule for rule, row in RULES.items() if row.rule.lossless and not row.needs and agrees(METHODS[name], row)]
        usual = {fitting[turn % len(fitting)]} | ({"coupled", "rejection"} if name == "draft-model" else set())
        pairs += [pytest.param(name, rule, marks=() if rule in usual else pytest.mark.exhaustive) for rule in fitting]
    return pairs


def made(name: str, target: Target, draft: Target, *, rule: str | None = None, **options: Any) -> Method:
    translation = toy_translation(VOCAB) if METHODS[name].any_tokenizer else None
    given = {"num_draft_tokens": 4, **options}
    return compose(name, target, draft=draft, acceptance=rule, policy="fixed", options=given, translation=translation)


def served(target: Target, method: Method, batch: int = 3) -> list[RequestState]:
    """Rows of different lengths and parameters, so that they come and go."""
    many = [Request(prompt, one, EOS) for prompt, one in zip(PROMPTS[1:6], [SEEDED, COUNTED, GREEDY] * 2, strict=False)]
    done = {step.request: step.state for step in run(Engine(target, method), many, max_batch_size=batch)}
    return [done[index] for index in range(len(many))]


def rounds_of(states: list[RequestState]) -> list[Any]:
    return [(state.output_ids, state.stats.num_passes, state.stats.num_drafted, state.stats.num_accepted) for state in states]


@pytest.mark.parametrize(("name", "rule"), rules_in_turn())
def test_rounds_are_those_of_drafting_in_turns(target, draft, name: str, rule: str) -> None:
    ours = served(target, made(name, target, draft, rule=rule, beside=True))
    assert rounds_of(ours) == rounds_of(served(target, made(name, target, draft, rule=rule)))


@pytest.mark.parametrize(("name", "schedule"), in_turn(("draft-model", "best-first"), ("in turn", "chance")))
def test_a_verdict_may_stop_anywhere(target, draft, name: str, schedule: str) -> None:
    plain = [state.output_ids for state in served(target, compose("plain", target))]
    method = made(name, target, draft, beside=True)
    cut = Method(method.drafter, Cut(method.rule, SCHEDULES[schedule]), method.policy)
    assert [state.output_ids for state in served(target, cut)] == plain


@pytest.mark.parametrize("name", ["draft-model", "draft-tree"])
def test_ends_are_foreseen(target, name: str) -> None:
    """The target as its own draft: only the first round of a text, and one after it was shortened, is drafted in turns."""
    method = made(name, target, target, beside=True, **({"branching": "1,1,1,1"} if name == "draft-tree" else {}))
    in_turns = 0
    asked = method.drafter.inner.propose

    def counted(state: Any, context: Any, plan: Any) -> Any:
        nonlocal in_turns
        in_turns += max(plan.max_depth) > 1 and context.cache is not None
        return asked(state, context, plan)

    method.drafter.inner.propose = counted
    engine = Engine(target, method)
    batch = engine.start([Request(PROMPTS[2], SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=2))])
    rounds = 0
    while not batch.rows[0].is_finished:
        engine.step(batch)
        rounds += 1
    assert rounds >= 6 and in_turns == 1


def test_what_sampled_rules_draw_at_the_end_is_foreseen(target) -> None:
    """A draft that is the target draws the token behind an accepted chain with the numbers of the rule."""
    method = made("draft-model", target, target, rule="rejection", beside=True)
    engine = Engine(target, method)
    batch = engine.start([Request(PROMPTS[2], SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=2))])
    hits = []
    while not batch.rows[0].is_finished:
        engine.step(batch)
        hits.append(batch.drafter_state.ahead.texts[0] == batch.rows[0].tokens)
    assert all(hits[:-1])


def test_the_drafts_cache_is_what_was_read(target, draft) -> None:
    """After wrong turns, on a row that comes and goes: the same keys as those of a fresh prefill."""
    engine = Engine(target, made("best-first", target, draft, beside=True))
    batch = engine.start([Request(prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for prompt in PROMPTS[2:5]])
    for _ in range(4):
        engine.step(batch)
        batch = batch.narrow([2, 0] if len(batch.rows) == 3 else [0, 1])
        cache, fresh = batch.drafter_state.inner.cache, draft.new_cache(len(batch.rows))
        draft.prefill([row.tokens[:-1] for row in batch.rows], fresh)
        for row, length in enumerate(cache.lengths):
            assert length <= fresh.lengths[row]
            torch.testing.assert_close(cache.keys[1][row, :, :length], fresh.keys[1][row, :, :length])


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.drafter.waits and not row.needs])
def test_a_row_that_has_to_wait_is_refused_with_its_reason(target, draft, name: str) -> None:
    with pytest.raises(CompositionError, match=f"{name}.*cannot draft beside the target: {METHODS[name].drafter.waits}"):
        made(name, target, draft, **({"beside": True}))


def test_a_grammar_or_a_processor_is_drafted_for_in_turns(target, draft) -> None:
    params = SamplingParams(max_tokens=9, logits_processors=[lambda ids, logits: logits])
    engine = Engine(target, made("draft-model", target, draft, beside=True))
    batch = engine.start([Request(PROMPTS[2], params)])
    engine.step(batch)
    assert isinstance(engine.method.drafter, Beside) and batch.drafter_state.ahead is None
