"""Drafters that guess from the target's own scores: the text of plain decoding, and fewer passes where the text repeats."""

from __future__ import annotations

import random

import pytest
from fresh_prefill import assert_always_fresh
from tiny_pair import VOCAB, tiny_model

from outrider.acceptance import Coupled, Delta
from outrider.core.interfaces import Drafter, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.drafters.itself.jacobi import Jacobi
from outrider.drafters.itself.lookahead import Lookahead, LookaheadOptions
from outrider.drafters.itself.successors import SuccessorTable
from outrider.drafters.itself.token_recycling import TokenRecycling, TokenRecyclingOptions
from outrider.drafters.plain import NullDrafter
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.policies.fixed import Fixed, FixedOptions

EOS = frozenset({VOCAB - 1})
PROMPTS = [[random.Random(i).randrange(VOCAB - 1) for _ in range(1 + 3 * i % 17)] for i in range(8)]
PROMPTS[3] = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=7)
EVERYTHING = SamplingParams(
    max_tokens=16, temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, typical_p=0.98, repetition_penalty=1.2,
    presence_penalty=0.3, frequency_penalty=0.2, logit_bias={3: 1.0}, banned_token_ids=[4], min_tokens=5, seed=11,
)  # fmt: skip


def recycling(target: Target, **options) -> Drafter:
    given = TokenRecyclingOptions(**options)
    return TokenRecycling(target, SuccessorTable(VOCAB, given.num_successors), given)


DRAFTERS = {
    "recycling-confidence": lambda target: recycling(target, num_successors=6),
    "recycling-ranks": lambda target: recycling(target, grow="ranks", perturb=False, recycle_prompt=False),
    "lookahead": lambda target: Lookahead(LookaheadOptions(window=4, ngram=4, max_guesses=4)),
    "jacobi": lambda target: Jacobi(),
}
NAMES = list(DRAFTERS)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_model()


@pytest.fixture(scope="module")
def plain(target) -> dict[str, list[list[int]]]:
    """Plain decoding's texts."""
    method = Method(NullDrafter(), Coupled(), Fixed())
    cases = {"greedy": GREEDY, "sampled": SAMPLED, "everything": EVERYTHING}
    return {name: tokens(serve(target, method, params)) for name, params in cases.items()}


def method_of(name: str, target: Target, *, rule=Coupled, depth: int = 8, nodes: int = 24) -> Method:
    return Method(DRAFTERS[name](target), rule(), Fixed(FixedOptions(depth, nodes)))


def serve(target: Target, method: Method, params, prompts=PROMPTS, *, batch: int = 1) -> list[RequestState]:
    done: dict[int, RequestState] = {}
    for step in run(Engine(target, method), [Request(prompt, params, EOS) for prompt in prompts], max_batch_size=batch):
        if step.state.is_finished:
            done[step.request] = step.state
    return [done[i] for i in range(len(prompts))]


def tokens(states: list[RequestState]) -> list[list[int]]:
    return [state.output_ids for state in states]


@pytest.mark.parametrize(("rule", "batch"), [(Coupled, 1), (Delta, 8)])  # in threes: the next test
@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_plain_greedy(target, plain, name: str, rule, batch: int) -> None:
    prompts = PROMPTS[:batch] if batch > 1 else PROMPTS[2:4]  # alone, two of them
    found = serve(target, method_of(name, target, rule=rule), GREEDY, prompts, batch=batch)
    assert tokens(found) == [plain["greedy"][PROMPTS.index(prompt)] for prompt in prompts]


@pytest.mark.parametrize(
    ("case", "depth", "nodes"),
    [
        ("everything", 1, 1),
        ("sampled", 8, 24),
        pytest.param("sampled", 1, 1, marks=pytest.mark.exhaustive),
        pytest.param("everything", 8, 24, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_text(target, plain, name: str, depth: int, nodes: int, case: str) -> None:
    """Alone and in a batch that requests join while others run, whatever the size of the tree."""
    params = {"sampled": SAMPLED, "everything": EVERYTHING}[case]
    method = method_of(name, target, depth=depth, nodes=nodes)
    assert tokens(serve(target, method, params, batch=3)) == plain[case]
    if case == "sampled" and nodes > 1:  # a table that outlives requests changes nothing, nor does being alone
        assert tokens(serve(target, method, params, PROMPTS[:2])) == plain[case][:2]
        assert tokens(serve(target, method, params, batch=8)) == plain[case]


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_after_every_commit_is_that_of_a_fresh_prefill(target, name: str) -> None:
    requests = [Request(p, SamplingParams(max_tokens=16, ignore_eos=True)) for p in PROMPTS[2:6]]
    assert_always_fresh(Engine(target, method_of(name, target)), requests)


LONG = SamplingParams(max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def repeating(target) -> list[list[int]]:
    """Greedy decoding of a small random model runs into loops."""
    return tokens(serve(target, Method(NullDrafter(), Coupled(), Fixed()), LONG, PROMPTS[:4], batch=4))


@pytest.mark.parametrize("name", NAMES)
def test_text_that_repeats_takes_fewer_passes(target, repeating, name: str) -> None:
    states = serve(target, method_of(name, target, depth=8, nodes=40), LONG, PROMPTS[:4], batch=4)
    assert tokens(states) == repeating
    rate = sum(s.stats.num_tokens for s in states) / sum(s.stats.num_passes for s in states)
    assert rate > (1.02 if name == "jacobi" else 1.5)


def test_the_table_outlives_requests(target) -> None:
    """A first request has nothing to guess from; the next begins where it left off."""
    method, sizes = method_of("recycling-ranks", target), list[list[int]]()
    for _ in range(2):
        steps = run(Engine(target, method), [Request([7], GREEDY, EOS)], max_batch_size=1)
        sizes.append([len(step.trace.tokens) for step in steps])
    assert sizes[0][0] == 1 and sizes[1][0] > 8


def test_a_guess_that_matches_to_its_end_brings_its_bonus(target) -> None:
    """N - 1 guesses of an n-gram and the target's token after them: N tokens in one pass."""
    method = Method(Lookahead(LookaheadOptions(window=4, ngram=4)), Coupled(), Fixed(FixedOptions(3, 60)))
    request = Request(PROMPTS[3], SamplingParams(max_tokens=80, ignore_eos=True), EOS)
    assert max(len(step.new_tokens) for step in run(Engine(target, method), [request], max_batch_size=1)) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_full_context_ends_the_text(name: str) -> None:
    short = tiny_model(max_len=20)
    for state in serve(short, method_of(name, short), SamplingParams(max_tokens=99), [[1] * 10, [2] * 19, [3]], batch=3):
        assert len(state.tokens) <= 20 and state.is_finished
