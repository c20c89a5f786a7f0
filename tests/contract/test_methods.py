"""What every row of the table promises, on small random models: the text of plain decoding, however it was reached."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from fresh_prefill import assert_always_fresh
from tiers import repeats
from tiny_heads import random_heads
from tiny_pair import VOCAB, tiny_model
from toy_codecs import toy_translation

from outrider.core.draft import Draws, Shape
from outrider.core.errors import CompositionError, OptionError, RequestError
from outrider.core.interfaces import Cache, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import FinishReason, Origin, Request, RequestState
from outrider.drafters.copying.datastore_build import build_datastore
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import METHODS, RULES, compose

EOS = frozenset({VOCAB - 1})
_DRAW = random.Random(0)
PROMPTS = [[_DRAW.randrange(VOCAB - 1) for _ in range(1 + 3 * i % 17)] for i in range(8)]
PROMPTS[3] = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]  # something to copy
COUPLED_ROWS = [name for name, row in METHODS.items() if row.acceptance == "coupled"]
GREEDY = SamplingParams(max_tokens=9)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, seed=7)
EVERYTHING = SamplingParams(
    max_tokens=10, temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, typical_p=0.98, repetition_penalty=1.2,
    presence_penalty=0.3, frequency_penalty=0.2, logit_bias={3: 1.0}, banned_token_ids=[4], min_tokens=5, seed=11,
)  # fmt: skip
LOGGED = SamplingParams(max_tokens=8, temperature=0.7, seed=5, logprobs=3)
LONGER = SamplingParams(max_tokens=24)
SHORT = SamplingParams(max_tokens=12)
USUAL = [("top-p", 7, 8), ("everything", 3, 3), ("top-p", 1, 1), ("everything", 7, 8)]
"""Sampler, draft length and batch size. Methods take turns, so that all values occur."""


def ways() -> list[Any]:
    """Every coupled row with every way; all but the usual one are left to ``make test-all``."""
    products = list(itertools.product(("top-p", "everything"), (1, 3, 7), (1, 3, 8)))
    return [
        pytest.param(name, *way, marks=() if way == USUAL[turn % len(USUAL)] else pytest.mark.exhaustive)
        for turn, name in enumerate(COUPLED_ROWS)
        for way in products
    ]


@pytest.fixture(scope="module")
def make(target, draft, tmp_path_factory):
    """``compose`` with what some rows need besides the models."""
    store = tmp_path_factory.mktemp("datastore") / "store"
    build_datastore([prompt * 3 for prompt in PROMPTS], store, vocab_size=VOCAB)
    heads = {name: random_heads(name, store.parent / name) for name, row in METHODS.items() if "heads" in row.needs}

    def build(name: str, **arguments) -> Method:
        needed = {"datastore": str(store), "heads": heads.get(name)}
        options = {**arguments.pop("options", {}), **{need: needed[need] for need in METHODS[name].needs}}
        if METHODS[name].any_tokenizer:
            arguments["translation"] = toy_translation(VOCAB)
        return compose(name, target, draft=draft, options=options, **arguments)

    return build


def serve(target: Target, method: Method, prompts, params, *, batch: int = 1, **more) -> list[RequestState]:
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [Request(prompt, one, EOS, **more) for prompt, one in zip(prompts, each, strict=True)]
    done: dict[int, RequestState] = {}
    for step in run(Engine(target, method), requests, max_batch_size=batch):
        if step.state.is_finished:
            done[step.request] = step.state
    return [done[i] for i in range(len(prompts))]


def tokens(states: list[RequestState]) -> list[list[int]]:
    return [state.output_ids for state in states]


@pytest.fixture(scope="module")
def said(target):
    """What plain decoding says, asked once for each set of parameters."""
    known: dict[tuple, list[RequestState]] = {}

    def ask(params: SamplingParams, prompts=PROMPTS, **more) -> list[RequestState]:
        key = (id(params), str(prompts), *more)
        if key not in known:
            known[key] = serve(target, compose("plain", target), prompts, params, **more)
        return known[key]

    return ask


def pairs() -> list[tuple[str, str]]:
    """Every method with every rule that accepts it."""
    return [
        (name, rule)
        for name, row in METHODS.items()
        for rule, entry in RULES.items()
        if entry.rule.lossless and set(entry.rule.exact_for) & set(row.drafter.offers)
        if row.drafter.shape is Shape.CHAIN or entry.rule.shape is Shape.TREE
    ]


def draws_of(name: str, rule: str) -> Draws:
    """How a method draws its guesses under a rule."""
    return next(draws for draws in RULES[rule].rule.exact_for if draws in METHODS[name].drafter.offers)


def tiered_pairs() -> list[Any]:
    """Every pair; all but one rule for each method and way of drawing are left to ``make test-all``.

    A drafter knows of its rule only how guesses are to be drawn, so one rule shows what it does. The rules take turns.
    """
    usual: set[tuple[str, str]] = set()
    for turn, name in enumerate(METHODS):
        by_draws: dict[Draws, list[str]] = {}
        for _, rule in filter(lambda pair: pair[0] == name, pairs()):
            by_draws.setdefault(draws_of(name, rule), []).append(rule)
        usual |= {(name, rules[turn % len(rules)]) for rules in by_draws.values()}
    return [pytest.param(*pair, marks=() if pair in usual else pytest.mark.exhaustive) for pair in pairs()]


def test_every_rule_and_way_of_drawing_is_among_the_usual_pairs() -> None:
    usual = [case.values for case in tiered_pairs() if not case.marks]
    assert {rule for _, rule in usual} == {rule for _, rule in pairs()}
    assert {(name, draws_of(name, rule)) for name, rule in usual} == {(name, draws_of(name, rule)) for name, rule in pairs()}


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.exhaustive), 8])
@pytest.mark.parametrize(("name", "rule"), tiered_pairs())
def test_greedy_is_plain_greedy(target, make, said, name: str, rule: str, batch: int) -> None:
    """One at a time, the stop strings below show the same."""
    method = make(name, acceptance=rule)
    prompts = PROMPTS[1:6]
    assert tokens(serve(target, method, prompts, GREEDY, batch=batch)) == tokens(said(GREEDY, prompts))


@pytest.mark.parametrize(("name", "sampler", "length", "batch"), ways())
def test_same_seed_same_text(target, make, said, name: str, sampler: str, length: int, batch: int) -> None:
    """Alone and in a batch, whatever the drafter and the draft length; in threes, requests join while others run."""
    params, prompts = {"top-p": SAMPLED, "everything": EVERYTHING}[sampler], PROMPTS[2:4] if batch == 1 else PROMPTS[:5]
    method = make(name, options={"num_draft_tokens": length})
    assert tokens(serve(target, method, prompts, params, batch=batch)) == tokens(said(params, prompts))


def test_different_seeds_give_different_texts(target) -> None:
    plain = compose("plain", target)
    texts = [serve(target, plain, PROMPTS[:1], SamplingParams(max_tokens=24, temperature=1.0, seed=s)) for s in range(4)]
    assert len({tuple(tokens(text)[0]) for text in texts}) == 4
    unseeded = [serve(target, plain, PROMPTS[:1], SamplingParams(max_tokens=24, temperature=1.0)) for _ in range(2)]
    assert tokens(unseeded[0]) != tokens(unseeded[1])


def test_one_batch_may_mix_parameters(target, draft) -> None:
    mixed = [SamplingParams(max_tokens=9), SAMPLED, EVERYTHING, SamplingParams(max_tokens=3, temperature=1.5, seed=1)] * 2
    expected = [tokens(serve(target, compose("plain", target), [p], s))[0] for p, s in zip(PROMPTS, mixed, strict=True)]
    assert tokens(serve(target, compose("draft-model", target, draft=draft), PROMPTS, mixed, batch=8)) == expected


def test_a_better_draft_is_accepted_more_and_itself_always(target) -> None:
    accepted = []
    for noise in (0.0, 0.1, 0.8):
        states = serve(target, compose("draft-model", target, draft=tiny_model(noise)), PROMPTS, SAMPLED, batch=8)
        accepted.append(sum(s.stats.num_accepted for s in states) / sum(s.stats.num_tested for s in states))
    assert accepted[0] == 1.0 > accepted[1] > accepted[2]


def test_a_draft_with_a_shorter_context_stops_drafting(target) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = tokens(serve(target, compose("plain", target), PROMPTS, params, batch=8))
    method = compose("draft-model", target, draft=tiny_model(0.1, max_len=24))
    assert tokens(serve(target, method, PROMPTS[:3], params)) == expected[:3]
    assert tokens(serve(target, method, PROMPTS, params, batch=8)) == expected


def test_a_draft_with_fewer_tokens_never_guesses_the_others(target) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.2, seed=3)
    prompts = [[token % 40 for token in prompt] for prompt in PROMPTS]
    expected = tokens(serve(target, compose("plain", target), prompts, params, batch=8))
    small = _ClampedVocab(tiny_model(0.1, vocab_size=40))
    assert tokens(serve(target, compose("draft-model", target, draft=small), prompts, params, batch=4)) == expected


class _ClampedVocab(Target):
    """A draft with a smaller embedding: unknown tokens are read as token 0 (padding of embeddings differs in real pairs)."""

    def __init__(self, inner: Target) -> None:
        self.inner = inner
        self.vocab_size, self.max_len = inner.vocab_size, inner.max_len
        self.num_layers, self.device, self.dtype = inner.num_layers, inner.device, inner.dtype

    def _known(self, tokens):
        return torch.where(tokens < self.vocab_size, tokens, 0)

    def new_cache(self, batch_size: int) -> Cache:
        return self.inner.new_cache(batch_size)

    def prefill(self, rows, cache, *, taps=()):
        return self.inner.prefill([[t if t < self.vocab_size else 0 for t in row] for row in rows], cache, taps=taps)

    def score(self, tree, cache, *, taps=(), start=0, resume=None):
        known = type(tree)(self._known(tree.tokens), tree.parents, tree.sizes, tree.is_chain)
        return self.inner.score(known, cache, taps=taps, start=start, resume=resume)

    def logits(self, hidden):
        return self.inner.logits(hidden)


@pytest.mark.parametrize("name", list(METHODS))
def test_the_cache_after_every_commit_is_that_of_a_fresh_prefill(target, make, name: str) -> None:
    requests = [Request(p, SamplingParams(max_tokens=8, ignore_eos=True)) for p in PROMPTS[2:5]]
    assert_always_fresh(Engine(target, make(name)), requests)


@pytest.mark.parametrize("name", COUPLED_ROWS)
def test_logprobs_are_those_of_plain_decoding(target, make, said, name: str) -> None:
    prompts = PROMPTS[2:5]
    for mine, plain in zip(serve(target, make(name), prompts, LOGGED, batch=3), said(LOGGED, prompts), strict=True):
        assert [entry.token for entry in mine.logprobs] == mine.output_ids
        for a, b in zip(mine.logprobs, plain.logprobs, strict=True):
            assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


class Letters:
    """A detokenizer: token 3 is 'd'; token 30 is 'é', written by a token that completes nothing and one that does."""

    def push(self, token: int) -> str:
        return chr(97 + token % 26)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_stop_string_cuts_exactly_there(target, make, said, name: str) -> None:
    plain = zip(said(LONGER, new_stream=Letters), PROMPTS, strict=True)
    long_enough = [(state, prompt) for state, prompt in plain if len(state.text) >= 12]
    for turn in repeats(1, of=2):
        state, prompt = long_enough[turn]
        stop = state.text[8:11]
        params = SamplingParams(max_tokens=24, stop=[stop, "never-there"])
        cut = serve(target, make(name), [prompt], params, new_stream=Letters)[0]
        assert cut.text == state.text[: state.text.index(stop)]
        assert cut.output_ids == state.output_ids[: state.text.index(stop) + 3]
        assert cut.finish_reason is FinishReason.STOP and cut.stop_match == stop


@pytest.mark.parametrize("name", list(METHODS))
def test_lengths_and_ends(target, make, said, name: str) -> None:
    """Requests of one batch end at their own limits and tokens."""
    method, free = make(name, options={"num_draft_tokens": 7}), said(SHORT)[0].output_ids
    limits = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in (1, 2, 9)]
    stop = {"max_tokens": SHORT.max_tokens, "stop_token_ids": [free[4]]}
    each = [*limits, SamplingParams(**stop), SamplingParams(**stop, min_tokens=8)]
    *limited, stopped, later = serve(target, method, [*PROMPTS[:3], PROMPTS[0], PROMPTS[0]], each, batch=8)
    for state, params in zip(limited, limits, strict=True):
        assert state.num_output == params.max_tokens and state.finish_reason is FinishReason.LENGTH
    assert stopped.output_ids == free[: free.index(free[4]) + 1]
    assert free[4] not in later.output_ids[:8] and later.num_output >= 8


@pytest.mark.parametrize("name", list(METHODS))
def test_a_full_context_ends_the_text(make, name: str) -> None:
    short = tiny_model(max_len=20)
    for state in serve(short, make(name), [[1] * 10, [2] * 19], SamplingParams(max_tokens=99), batch=2):
        assert len(state.tokens) <= 20
        assert state.finish_reason is not None


def test_statistics_add_up(target, draft) -> None:
    for state in serve(target, compose("draft-model", target, draft=draft), PROMPTS, SamplingParams(max_tokens=25), batch=8):
        stats = state.stats
        assert stats.num_tokens == state.num_output == len(state.origins)
        assert stats.num_accepted >= sum(origin is Origin.ACCEPTED for origin in state.origins)
        assert stats.num_passes == sum(origin is not Origin.ACCEPTED for origin in state.origins) or state.is_finished
        assert stats.num_accepted <= stats.num_tested <= stats.num_drafted


def test_wrong_pairs_are_refused_when_composed(target, draft) -> None:
    for rule in ("rejection", "block"):
        with pytest.raises(CompositionError, match=r"PromptLookup.*deterministic"):
            compose("prompt-lookup", target, acceptance=rule)
    with pytest.raises(CompositionError, match=r"needs a draft model"):
        compose("draft-model", target)
    with pytest.raises(OptionError, match="did you mean 'draft-model'"):
        compose("drft-model", target)
    with pytest.raises(OptionError, match="did you mean 'num_draft_tokens'"):
        compose("draft-model", target, draft=draft, options={"num_draft_token": 3})
    with pytest.raises(OptionError, match="num_draft_tokens = 0"):
        compose("draft-model", target, draft=draft, options={"num_draft_tokens": 0})
    with pytest.raises(OptionError, match="min_ngram"):
        compose("prompt-lookup", target, options={"min_ngram": 5, "max_ngram": 2})


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([1] * 256, {}, "context holds 256"),
        ([1], {"logit_bias": {999: 1.0}}, "logit_bias"),
        ([1], {"stop": ["x"]}, "tokenizer"),
    ],
)
def test_bad_requests_are_refused(target, prompt, params, word: str) -> None:
    engine = Engine(target, compose("plain", target))
    with pytest.raises(RequestError, match=word):
        engine.start([Request(prompt, SamplingParams(**params))])
