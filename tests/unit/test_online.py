"""A draft that learns while it serves: more guesses are accepted, the text stays, and a worse draft is never swapped in."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from tiny_heads import random_head
from tiny_pair import _RAW, VOCAB, tiny_model

from outrider.core.errors import CompositionError, ModelError, OptionError
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Origin, Request, RequestState
from outrider.drafters.heads.medusa import Medusa
from outrider.engine.replace_drafter import replace_drafter
from outrider.engine.step import Batch, Engine
from outrider.methods import compose
from outrider.models.config import config_of
from outrider.models.heads import KINDS
from outrider.train.data import Document
from outrider.train.draft_lm import DraftLM
from outrider.train.online import Judgement, OnlineSettings, online_draft, online_heads, online_sorted_draft
from outrider.train.taught_states import TaughtStates
from outrider.train.uniform_sample import UniformSample

TARGET = tiny_model()
QUICK = OnlineSettings(
    update_every=40, num_steps=6, batch_size=8, held_every=4, learning_rate=3e-3, warmup_steps=2, average=0.5
)


def new_draft() -> DraftLM:
    raw = {**_RAW, "num_hidden_layers": 1}
    config = config_of(raw)
    assert config is not None
    torch.manual_seed(0)
    return DraftLM(config, raw, Path())


def requests(count: int, temperature: float, first_seed: int = 0) -> list[Request]:
    found = []
    for seed in range(first_seed, first_seed + count):
        prompt = [random.Random(seed).randrange(VOCAB) for _ in range(3)]
        found.append(Request(prompt, SamplingParams(max_tokens=20, temperature=temperature, seed=seed)))
    return found


def method_with(model, rule: str = "coupled") -> Method:
    return compose("draft-model", TARGET, draft=model, acceptance=rule, options={"num_draft_tokens": 3})


def serve(engine: Engine, asked: list[Request]) -> list[RequestState]:
    return finish(engine, engine.start(asked))


def finish(engine: Engine, batch: Batch) -> list[RequestState]:
    rows = batch.rows
    while (batch := batch.without_finished()).rows:
        engine.step(batch)
    return rows


def accepted(rows: list[RequestState]) -> float:
    return sum(row.stats.num_tokens for row in rows) / sum(row.stats.num_passes for row in rows)


def test_more_is_accepted_after_updates_and_the_text_stays() -> None:
    draft = new_draft()
    engine = Engine(TARGET, method_with(draft.served(torch.float32)))
    online, swaps = online_draft(draft, TARGET, QUICK), 0
    first = accepted(serve(engine, requests(12, 0.0, 900)))
    for turn in range(9):
        for row in serve(engine, requests(6, 0.0, turn * 6)):
            online.observe(row.request.prompt_ids, row.output_ids, row.origins)
        model = online.maybe_update()
        if model is not None:
            replace_drafter(engine, None, method_with(model))
            swaps += 1
    rows = serve(engine, requests(12, 0.0, 900))
    assert swaps >= 2 and accepted(rows) > first + 0.2
    assert all(step.swapped == (step.learned > step.served) for step in online.judgements)
    plain = serve(Engine(TARGET, compose("plain", TARGET)), requests(12, 0.0, 900))
    assert [row.tokens for row in rows] == [row.tokens for row in plain]


def test_a_step_that_waits_between_operations_is_the_same_step() -> None:
    documents = [Document(tuple(random.Random(seed).randrange(VOCAB) for _ in range(12))) for seed in range(6)]
    whole = online_draft(new_draft(), TARGET, QUICK)
    waiting = online_draft(new_draft(), TARGET, OnlineSettings(**{**vars(QUICK), "background": True}))
    steps = list[None]()
    waiting.pace.step = lambda: steps.append(None)  # type: ignore[method-assign]
    for learner in (whole, waiting):
        with torch.enable_grad(), learner.pace.working():
            learner._learn(documents)
    waiting.close()
    pairs = list(zip(whole._learner.parameters(), waiting._learner.parameters(), new_draft().parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other, _ in pairs) and len(steps) > 100
    assert not all(torch.equal(one, before) for one, _, before in pairs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_running_requests_go_on_with_another_draft(temperature: float) -> None:
    """Swapped in the middle of texts of different lengths: the same seeds, the same text."""
    asked = requests(4, temperature)
    plain = serve(Engine(TARGET, compose("plain", TARGET)), asked)
    engine = Engine(TARGET, method_with(tiny_model(0.3)))
    batch = engine.start(asked)
    for noise in (0.2, 0.4):
        engine.step(batch)
        engine.step(batch)
        replace_drafter(engine, batch, method_with(tiny_model(noise)))
    rows = finish(engine, batch)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert sum(row.stats.num_accepted for row in rows) > 0


def test_sampled_drafts_are_exchanged_too() -> None:
    engine = Engine(TARGET, method_with(tiny_model(0.2), "rejection"))
    batch = engine.start(requests(3, 1.0))
    engine.step(batch)
    replace_drafter(engine, batch, method_with(tiny_model(0.3), "rejection"))
    assert all(row.num_output == 20 for row in finish(engine, batch))


def test_a_draft_that_gets_worse_is_not_swapped_in() -> None:
    """A learning rate that ruins it: the gate holds, and the copy begins again."""
    settings = OnlineSettings(
        update_every=10, held_every=2, learning_rate=30.0, margin=0.3, patience=1, prompts=False, replay=0
    )
    online = online_draft(new_draft(), TARGET, settings)
    engine = Engine(TARGET, method_with(tiny_model(0.5)))
    for row in serve(engine, requests(12, 0.0)):
        online.observe(row.request.prompt_ids, row.output_ids, row.origins)
    before = {name: tensor.clone() for name, tensor in online.module.state_dict().items()}
    assert online.maybe_update() is None
    assert not online.judgements[0].swapped
    assert all(torch.equal(tensor, before[name]) for name, tensor in online.module.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(online._learner.parameters(), online.module.parameters(), strict=True))


def test_only_rejected_places_count() -> None:
    online = online_draft(new_draft(), TARGET, OnlineSettings(update_every=10, rejected_only=True))
    kinds = [Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS, Origin.RECOVERED]
    online.observe([1, 2, 3], [4, 5, 6, 7], kinds)
    assert [document.counted for document in online._memory] == [(4, 6)]
    assert online._states.packed(list(online._memory)).supervised.nonzero()[:, 1].tolist() == [4, 6]
    online.observe([1, 2, 3], [4], [Origin.ACCEPTED])
    assert len(online._memory) == 1 and online.maybe_update() is None


def test_text_without_drafts_is_learnt_from_too() -> None:
    """A policy stops drafting where the draft is bad, so there are no rejections to learn from."""
    plain = [Origin.BONUS] * 6
    online = online_draft(new_draft(), TARGET, OnlineSettings(**{**vars(QUICK), "update_every": 40}))
    for text in range(12):
        online.observe([1, 2, text], [3, 4, 5, 6, 7, 8], plain)
    online.maybe_update()
    assert len(online.judgements) == 1
    strict = online_draft(new_draft(), TARGET, OnlineSettings(**{**vars(QUICK), "rejected_only": True}))
    for text in range(12):
        strict.observe([1, 2, text], [3, 4, 5, 6, 7, 8], plain)
    assert strict.maybe_update() is None and not strict.judgements


def test_learning_goes_on_in_idle_time_while_it_helps() -> None:
    """No new tokens came: another update begins unless requests are being served, or too many in a row did not help."""
    online = online_draft(new_draft(), TARGET, OnlineSettings(**{**vars(QUICK), "background": True}))
    for text in range(12):
        online.observe([1, 2, text], [3, 4, 5, 6, 7, 8], [Origin.ACCEPTED] * 6)
    try:
        assert online.maybe_update() is None and not online.is_learning, "every token was guessed"
        online.judgements.append(Judgement(1.2, 1.1, False))
        online.maybe_update()
        assert not online.is_learning, "the copy began anew"
        for helped, num_failed in (True, 0), (False, 1):
            online.judgements.append(Judgement(1.1, 1.2, helped))
            online._num_failed = num_failed
            online.maybe_update(is_idle=False)
            assert not online.is_learning, "requests come first"
        online.maybe_update()
        assert online.is_learning, "one that did not help is not the end"
    finally:
        online.close()


def test_prompts_count_too_unless_told_otherwise() -> None:
    for prompts, places in ((True, [0, 1, 2, 3, 4]), (False, [3, 4])):
        online = online_draft(new_draft(), TARGET, OnlineSettings(update_every=10, prompts=prompts))
        online.observe([1, 2, 3], [4, 5], [Origin.ACCEPTED, Origin.RECOVERED])
        assert online._states.packed(list(online._memory)).supervised.nonzero()[:, 1].tolist() == places
    assert OnlineSettings().prompts


def test_what_is_served_is_the_mean_of_what_was_learned() -> None:
    """After two steps: a a w0 + a (1 - a) w1 + (1 - a) w2; the first step is a tenth of a step."""
    settings = OnlineSettings(update_every=1, num_steps=1, margin=-9.0, learning_rate=1e-2, average=0.75)
    online, weights = online_draft(new_draft(), TARGET, settings), []
    weights.append(online._learner.model.norm.weight.detach().clone())
    for turn in range(10):
        online.observe([1, 2, turn], [4, 5, 6], [Origin.RECOVERED] * 3)
    for _ in range(2):
        online._num_new = 9
        assert online.maybe_update() is not None
        weights.append(online._learner.model.norm.weight.detach().clone())
    assert 0 < float((weights[1] - weights[0]).abs().max()) < 1.01e-3
    expected = 0.5625 * weights[0] + 0.1875 * weights[1] + 0.25 * weights[2]
    torch.testing.assert_close(online.module.model.norm.weight.data, expected)


def test_replay_mixes_in_what_was_served_long_ago() -> None:
    """The latest four, and a sample of all that came; of every step the wanted share is from the sample."""
    settings = OnlineSettings(memory=4, reservoir=12, replay=0.25, batch_size=4, held_every=2, num_steps=3)
    online, seen = online_draft(new_draft(), TARGET, settings), list[list[int]]()
    for turn in range(200):
        online.observe([1, 2, turn // 10], [4, 5, 6], [Origin.RECOVERED] * 3)
    assert [document.tokens[2] for document in online._memory] == [19] * 4
    kept = [document.tokens[2] for document in online._ever.kept]
    assert len(kept) == 12 and len(set(kept)) > 6 and min(kept) < 10 and max(kept) > 10
    online._learn = lambda documents: seen.append([document.tokens[2] for document in documents])
    online.maybe_update()
    assert [len(step) for step in seen] == [4] * 3 and all(step[1:] == [19] * 3 for step in seen)
    assert all(step[0] in kept for step in seen)
    with pytest.raises(OptionError, match="replay = 1"):
        OnlineSettings(replay=1.0)


def test_the_sample_is_uniform() -> None:
    """Each of 40 requests is kept with chance 10 / 40, whenever it came: in 400 samples 100 times, give or take 9."""
    counts = torch.zeros(40)
    for seed in range(400):
        sample = UniformSample(10, seed)
        for index in range(40):
            sample.add(Document((index,)))
        counts[[document.tokens[0] for document in sample.kept]] += 1
    assert counts.sum() == 4000 and counts.min() > 60 and counts.max() < 140


def test_learning_in_the_background() -> None:
    settings = OnlineSettings(**{**vars(QUICK), "background": True, "update_every": 20, "margin": -5.0})
    online = online_draft(new_draft(), TARGET, settings)
    for row in serve(Engine(TARGET, method_with(tiny_model(0.5))), requests(16, 0.0)):
        online.observe(row.request.prompt_ids, row.output_ids, row.origins)
    found = online.maybe_update()
    assert found is None and online._future is not None
    until = time.monotonic() + 60
    while found is None and online._future is not None and time.monotonic() < until:
        found = online.maybe_update()
    assert found is not None and found.vocab_size == VOCAB
    online.close()


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ModelError, match="same vocabulary"):
        online_draft(new_draft(), tiny_model(vocab_size=40))
    with pytest.raises(OptionError, match="held_every = 1"):
        OnlineSettings(held_every=1)
    with pytest.raises(OptionError, match="update_every = 0"):
        OnlineSettings(update_every=0)
    drafter = Medusa(random_head("medusa"))
    engine = Engine(TARGET, method_with(tiny_model(0.3)))
    with pytest.raises(CompositionError, match="states of the target that are no longer kept"):
        replace_drafter(engine, engine.start(requests(1, 0.0)), Method(drafter, engine.method.rule, engine.method.policy))
    with pytest.raises(OptionError, match="busy_share = 0"):
        OnlineSettings(busy_share=0.0)


USUAL = ("medusa", "eagle3", "dspark")
"""Kinds that learn while they serve in ``make test``. tests/unit/test_train.py trains all of them."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.exhaustive) for kind in KINDS])
def test_heads_of_every_kind_learn(kind: str) -> None:
    """More guesses are accepted in requests that were never learned from, and the target's own parts stay as they are."""
    head = random_head(kind)
    settings = OnlineSettings(**{**vars(QUICK), "num_steps": 10, "batch_size": 4, "num_held": 4, "learning_rate": 1e-2})
    online = online_heads(head, TARGET, settings)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    for row in serve(Engine(TARGET, compose("plain", TARGET)), requests(16, 0.0)):
        online.observe(row.request.prompt_ids, row.output_ids, row.origins)
    better = online.maybe_update()
    assert better is not None and better.config.kind == kind and not better.training
    assert online.judgements[0].learned > online.judgements[0].served
    after = better.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not changed & set(head.frozen)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


def test_a_draft_with_exits_learns_at_each() -> None:
    raw = {**_RAW, "num_hidden_layers": 2}
    config = config_of(raw)
    assert config is not None
    torch.manual_seed(0)
    draft = DraftLM(config, raw, Path())
    settings = OnlineSettings(**{**vars(QUICK), "margin": -9.0})
    online = online_sorted_draft(draft, TARGET, settings, dtype=torch.float32, exits=(1, 2))
    for row in serve(Engine(TARGET, compose("plain", TARGET)), requests(8, 0.0)):
        online.observe(row.request.prompt_ids, row.output_ids, row.origins)
    model = online.maybe_update()
    assert model is not None and model.num_layers == 2
    assert online.pupil.objective(online.module).exits == (1, 2)


def test_texts_are_read_by_the_target_once() -> None:
    documents = [Document(tuple(range(1, size))) for size in (5, 9, 7)]
    states = TaughtStates(TARGET, (1,), 10**9)
    first, again = states.packed(documents), states.packed(documents[::-1])
    assert torch.equal(first.last.sum(), again.last.sum()) and first.features.shape[-1] == first.last.shape[-1]
    known = states.num_bytes
    states.packed(documents[:1])
    assert states.num_bytes == known > 0
    fresh = TaughtStates(TARGET, (1,), 10**9).packed(documents[1:2])
    assert torch.equal(fresh.last, states.packed(documents[1:2]).last)
    forgetful = TaughtStates(TARGET, (1,), 0)
    assert torch.equal(forgetful.packed(documents).last, first.last) and forgetful.num_bytes == 0
