"""What every tree of a draft model promises: the text of plain decoding, right caches, and (sampled) the target's law."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from fresh_prefill import assert_fresh
from markov import Markov
from test_methods import EVERYTHING, PROMPTS, SAMPLED, serve, tokens
from tiers import in_turn, repeats
from tiny_pair import VOCAB, tiny_model

from outrider.acceptance import Block, Coupled, Delta, KSeq, Recursive, Rejection, Transport, Traversal
from outrider.core.draft import Draws, Shape
from outrider.core.errors import CompositionError
from outrider.core.interfaces import AcceptanceRule, Context, Drafter, Plan, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.mixed.hybrid import Hybrid
from outrider.drafters.model.best_first import BestFirst, BestFirstOptions
from outrider.drafters.model.draft_tree import DraftTree, DraftTreeOptions
from outrider.drafters.model.rsd_s import StochasticBeam, StochasticBeamOptions
from outrider.drafters.model.sequoia import best_tree
from outrider.drafters.model.spectr import ManyChains, ManyChainsOptions
from outrider.engine.step import Engine
from outrider.policies.fixed import Fixed, FixedOptions

CHOSEN, WITHOUT, IID = Draws.DETERMINISTIC, Draws.WITHOUT_REPLACEMENT, Draws.IID
RULES: list[type[AcceptanceRule]] = [Block, Coupled, Delta, KSeq, Recursive, Rejection, Transport, Traversal]
Make = Callable[[Target, int], Drafter]


def static(draws: Draws, branching: tuple[int, ...] = (3, 2, 1, 1)) -> Make:
    return lambda model, size: DraftTree(model, DraftTreeOptions(branching), vocab_size=size, draws=draws)


def sequoia(model: Target, size: int) -> Drafter:
    paths = best_tree((0.5, 0.2, 0.1), 12, max_depth=5).paths
    return DraftTree(model, DraftTreeOptions(rank_paths=paths), vocab_size=size)


DRAFTERS: dict[str, Make] = {
    "static coupled": static(CHOSEN),
    "static without replacement": static(WITHOUT),
    "static iid": static(IID),
    "static chain": static(CHOSEN, (1, 1, 1)),
    "sequoia": sequoia,
    "best first": lambda model, size: BestFirst(model, BestFirstOptions(width=3, num_children=3), vocab_size=size),
    "best first, narrow": lambda model, size: BestFirst(model, BestFirstOptions(1, 2, tau=0.01), vocab_size=size),
    "best first by q": lambda model, size: BestFirst(model, BestFirstOptions(perturb=False), vocab_size=size),
    "stochastic beam": lambda model, size: StochasticBeam(model, StochasticBeamOptions(3), vocab_size=size),
    "chains apart": lambda model, size: ManyChains(model, ManyChainsOptions(3), vocab_size=size),
    "chains merged": lambda model, size: ManyChains(model, ManyChainsOptions(3), vocab_size=size, draws=WITHOUT),
    "fused": lambda model, size: Hybrid([PromptLookup(), BestFirst(model, vocab_size=size), sequoia(model, size)]),
}
PARAMS = {"greedy": SamplingParams(max_tokens=10), "sampled": SAMPLED, "everything": EVERYTHING}
POLICY = Fixed(FixedOptions(num_draft_tokens=4, num_tree_nodes=14))


@pytest.fixture(scope="module")
def expected(target) -> dict[str, list[list[int]]]:
    from outrider.methods import compose

    plain = compose("plain", target)
    return {name: tokens(serve(target, plain, PROMPTS, params)) for name, params in PARAMS.items()}


def rules_for(name: str) -> list[type[AcceptanceRule]]:
    drafter = DRAFTERS[name](Markov(torch.zeros(3, 3)), 3)
    return [rule for rule in RULES if drafter.draws in rule.exact_for and rule.shape is Shape.TREE]


def one_rule_each() -> list[Any]:
    """Every tree with every rule that takes it. ``make test`` has one rule a tree, in turn, such that each rule occurs."""
    pairs, usual, seen = [(name, rule) for name in DRAFTERS for rule in rules_for(name)], set[tuple[str, Any]](), list[Any]()
    for name in DRAFTERS:
        rule = min(rules_for(name), key=seen.count)
        seen.append(rule)
        usual.add((name, rule))
    return [pytest.param(*pair, marks=() if pair in usual else pytest.mark.exhaustive) for pair in pairs]


def test_every_rule_is_among_the_usual_pairs() -> None:
    usual = [case.values for case in one_rule_each() if not case.marks]
    assert {rule for _, rule in usual} == {rule for name in DRAFTERS for rule in rules_for(name)}
    assert [name for name, _ in usual] == list(DRAFTERS)


@pytest.mark.parametrize(("name", "rule"), one_rule_each())
def test_greedy_is_plain_greedy_under_every_rule(target, draft, expected, name: str, rule: type[AcceptanceRule]) -> None:
    method = Method(DRAFTERS[name](draft, VOCAB), rule(), POLICY)
    states = serve(target, method, PROMPTS[:5], PARAMS["greedy"], batch=3)
    assert tokens(states) == expected["greedy"][:5]
    assert sum(state.stats.num_accepted for state in states) > 5


@pytest.mark.parametrize(("name", "params"), in_turn(DRAFTERS, ("sampled", "everything")))
def test_same_seed_same_text(target, draft, expected, name: str, params: str) -> None:
    """Under the coupled rule, whatever was drawn and however; alone, in a batch, and with requests that join."""
    method = Method(DRAFTERS[name](draft, VOCAB), Coupled(), POLICY)
    for batch, count in ((1, 1), (8, 5)) if params == "sampled" else ((3, 5),):
        assert tokens(serve(target, method, PROMPTS[:count], PARAMS[params], batch=batch)) == expected[params][:count]


def test_one_batch_may_mix_temperatures(target, draft) -> None:
    from outrider.methods import compose

    mixed = [PARAMS["greedy"], SAMPLED, EVERYTHING, SamplingParams(max_tokens=3, temperature=1.5, seed=1)] * 2
    plain = compose("plain", target)
    expected = [tokens(serve(target, plain, [p], s))[0] for p, s in zip(PROMPTS, mixed, strict=True)]
    for name in ("static coupled", "best first", "stochastic beam", "chains merged"):
        method = Method(DRAFTERS[name](draft, VOCAB), Coupled(), POLICY)
        assert tokens(serve(target, method, PROMPTS, mixed, batch=8)) == expected


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "fused"])
def test_caches_after_every_commit_are_those_of_a_fresh_prefill(target, draft, name: str) -> None:
    engine = Engine(target, Method(DRAFTERS[name](draft, VOCAB), Coupled(), POLICY))
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=3, ignore_eos=True)
    batch = engine.start([Request(prompt, params) for prompt in PROMPTS[2:5]])
    while batch.rows:
        engine.step(batch)
        assert_fresh(target, batch.cache, batch.rows)
        assert_fresh(draft, batch.drafter_state.cache, batch.rows, most_lag=1)
        batch = batch.without_finished()


@pytest.mark.parametrize("name", ["static coupled", "best first", "stochastic beam", "fused"])
def test_a_draft_with_a_shorter_context_stops_drafting(target, name: str) -> None:
    from outrider.methods import compose

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = PROMPTS[2:6]
    expected = tokens(serve(target, compose("plain", target), prompts, params, batch=4))
    method = Method(DRAFTERS[name](tiny_model(0.1, max_len=24), VOCAB), Coupled(), POLICY)
    assert tokens(serve(target, method, prompts, params, batch=4)) == expected


def test_a_stochastic_beam_is_refused_by_rules_that_look_below_first(draft) -> None:
    with pytest.raises(CompositionError, match=r"StochasticBeam.*Traversal.*beam"):
        Method(StochasticBeam(draft, vocab_size=VOCAB), Traversal(), POLICY)


# --- sampled trees keep the law of the target -------------------------------------------------------------------------

SIZE, LENGTH, BATCH = 3, 3, 5000
P, Q = ((torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5).log_softmax(-1) for seed in (1, 2))


def law_of_texts() -> torch.Tensor:
    texts = itertools.product(range(SIZE), repeat=LENGTH)
    return torch.tensor([math.exp(sum(float(P[a, b]) for a, b in itertools.pairwise((0, *text)))) for text in texts])


@cache
def one_sampler() -> Sampler:
    """The sampler of all rounds: whose text is sampled does not matter."""
    return Sampler([RequestState.of(Request([0], SamplingParams(temperature=1.0)))] * BATCH, SIZE, torch.device("cpu"))


def emitted(drafter: Drafter, rule: AcceptanceRule, *, first_seed: int) -> torch.Tensor:
    """[BATCH, LENGTH] one round from token 0 with real random numbers, continued from P."""
    noise = Noise(torch.arange(BATCH) + first_seed, torch.zeros(BATCH, dtype=torch.int64))
    sampler = one_sampler()
    context = Context([[0]] * BATCH, sampler, noise, torch.device("cpu"))
    drawn = drafter.propose(drafter.start([[0]] * BATCH, {}), context, Plan((LENGTH,) * BATCH, (9,) * BATCH))
    verdict = rule.walk(drawn, sampler.law(P[drawn.tree.tokens], drawn.tree, noise), noise)
    path = torch.nn.functional.pad(verdict.path, (0, LENGTH + 1))[:, : LENGTH + 1]
    run = drawn.tree.tokens.gather(1, path).scatter(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
    chance = torch.Generator().manual_seed(first_seed)
    last = torch.zeros(BATCH, dtype=torch.int64)
    for place in range(LENGTH):
        fresh = torch.multinomial(P.exp()[last], 1, generator=chance)[:, 0]
        last = run[:, place] = torch.where(place <= verdict.num_accepted, run[:, place], fresh)
    return run[:, :LENGTH]


def assert_law(drafter: Drafter, rule: AcceptanceRule) -> None:
    """The texts of many rounds are distributed as the target's, by a chi-square test."""
    counts = torch.zeros(SIZE**LENGTH)
    rounds = repeats(3, of=6)
    for number in rounds:
        texts = emitted(drafter, rule, first_seed=10**6 * (number + 1))
        codes = (texts * SIZE ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
        counts += torch.bincount(codes, minlength=len(counts))
    expected = law_of_texts() * BATCH * len(rounds)
    chi_square, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


SAMPLED_TREES = [
    ("static without replacement", Recursive),
    ("static without replacement", Traversal),
    ("static iid", Recursive),
    ("stochastic beam", Recursive),
    ("chains apart", KSeq),
    ("chains apart", Transport),
    ("chains merged", Traversal),
]


@pytest.mark.parametrize(("name", "rule"), SAMPLED_TREES)
def test_sampled_trees_keep_the_law(name: str, rule: type[AcceptanceRule]) -> None:
    """The rules are proved by enumeration; this is about what the drafters really draw, and hand on as q."""
    assert_law(DRAFTERS[name](Markov(Q), SIZE), rule())
