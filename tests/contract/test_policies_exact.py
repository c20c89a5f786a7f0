"""Whatever a policy plans, and wherever a stopping rule ends a draft, the text is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from test_methods import EVERYTHING, SAMPLED, serve, tokens
from tiny_pair import VOCAB, tiny_model

from outrider.acceptance import Block, Coupled, Rejection
from outrider.core.draft import Draws
from outrider.core.interfaces import Cache, Context, Drafter, Policy, StopRule, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.core.sampling import Law
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.ngram import PromptLookup
from outrider.drafters.null import NullDrafter
from outrider.engine.step import Engine
from outrider.policies.adaptive import Adaptive
from outrider.policies.bandit import Bandit, BanditOptions
from outrider.policies.belief import entropy_of, probability_of
from outrider.policies.confidence import Confidence, ConfidenceOptions, ConfidenceStop
from outrider.policies.entropy import Entropy, EntropyOptions
from outrider.policies.fixed import Fixed
from outrider.policies.heuristic import Heuristic
from outrider.policies.lengths import plan_of
from outrider.policies.optimal import Optimal
from outrider.policies.threshold import Threshold, ThresholdOptions

PROMPTS = [[random.Random(i).randrange(VOCAB - 1) for _ in range(1 + 3 * i % 17)] for i in range(8)]
PROMPTS[3] = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]  # something to copy
POLICIES: dict[str, Callable[[], Policy]] = {
    "heuristic": Heuristic,
    "optimal": Optimal,
    "adaptive": Adaptive,
    "ucb": lambda: Bandit(BanditOptions(with_zero=True)),
    "exp3": lambda: Bandit(BanditOptions(algorithm="exp3")),
    "confidence": Confidence,
    "entropy": lambda: Entropy(EntropyOptions(min_draft_tokens=0)),
    "threshold": Threshold,
    "at random": lambda: Planless(),
}


class Planless(Policy):
    """Any length from 0 to 6, per row, ended anywhere: what no sensible policy does must be exact too."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def start(self, num_rows: int):
        return Fixed().start(num_rows)

    def plan(self, state, num_rows: int):
        return plan_of([self.rng.randrange(7) for _ in range(num_rows)], 6, None, Coins(self.rng, num_rows))

    def update(self, state, observation) -> None:
        pass


class Coins(StopRule):
    def __init__(self, rng: random.Random, num_rows: int) -> None:
        self.rng, self.num_rows = rng, num_rows

    def before(self, depth: int, law: Law) -> list[bool]:
        return [self.rng.random() < 0.9 for _ in range(self.num_rows)]

    def after(self, depth: int, law: Law, guesses: torch.Tensor) -> list[bool] | None:
        return None if self.rng.random() < 0.5 else [self.rng.random() < 0.8 for _ in range(self.num_rows)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_model()


@pytest.fixture(scope="module")
def draft() -> Target:
    return tiny_model(0.15)


@pytest.fixture(scope="module")
def expected(target) -> dict[str, list[list[int]]]:
    plain = Method(NullDrafter(), Coupled(), Fixed())
    greedy = SamplingParams(max_tokens=24)
    return {name: tokens(serve(target, plain, PROMPTS, params)) for name, params in cases(greedy).items()}


def cases(greedy: SamplingParams) -> dict[str, SamplingParams]:
    return {"greedy": greedy, "top-p": SAMPLED, "everything": EVERYTHING}


def drafter_of(name: str, draft: Target) -> Drafter:
    return DraftModel(draft, vocab_size=VOCAB) if name == "draft-model" else PromptLookup()


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_is_that_of_plain_decoding(target, draft, expected, policy: str, drafter: str, batch: int) -> None:
    """Greedy and with the same seed; in a batch of 3, requests join while others run. One policy object serves them all."""
    method = Method(drafter_of(drafter, draft), Coupled(), POLICIES[policy]())
    for name, params in cases(SamplingParams(max_tokens=24)).items():
        if batch == 8 or name != "everything":
            assert tokens(serve(target, method, PROMPTS, params, batch=batch)) == expected[name], name


@pytest.mark.parametrize("policy", ["confidence", "entropy", "threshold", "at random", "adaptive"])
@pytest.mark.parametrize("rule", [Rejection, Block])
def test_sampled_drafts_that_stop_early_are_greedy_when_greedy(target, draft, expected, rule, policy: str) -> None:
    """The rules that use q walk ragged chains too. (That stopping keeps their law is Lemma C, shown by enumeration in
    test_rules_mutations.py: "a sampled guess dropped for its low confidence" is caught, its kept twin passes.)"""
    method = Method(DraftModel(draft, vocab_size=VOCAB, draws=Draws.IID), rule(), POLICIES[policy]())
    assert tokens(serve(target, method, PROMPTS, SamplingParams(max_tokens=24), batch=3)) == expected["greedy"]


# --- the drafter honours the rule -------------------------------------------------------------------------------------


class Counting(Target):
    """Counts passes."""

    def __init__(self, inner: Target) -> None:
        self.inner, self.num_passes = inner, 0
        self.vocab_size, self.max_len = inner.vocab_size, inner.max_len
        self.num_layers, self.device, self.dtype = inner.num_layers, inner.device, inner.dtype

    def new_cache(self, batch_size: int) -> Cache:
        return self.inner.new_cache(batch_size)

    def prefill(self, rows, cache, *, taps=()):
        return self.inner.prefill(rows, cache, taps=taps)

    def logits(self, hidden):
        return self.inner.logits(hidden)

    def score(self, tree, cache, *, taps=()):
        self.num_passes += 1
        return self.inner.score(tree, cache, taps=taps)


class Script(StopRule):
    """Ends row b before or after guess number ``ends[b]``."""

    def __init__(self, ends: list[int], *, after: bool) -> None:
        self.ends, self.is_after = ends, after

    def before(self, depth: int, law: Law) -> list[bool] | None:
        assert law.adjusted.shape[:2] == (len(self.ends), 1)
        return None if self.is_after else [depth < end for end in self.ends]

    def after(self, depth: int, law: Law, guesses: torch.Tensor) -> list[bool] | None:
        assert guesses.shape == (len(self.ends),)
        return [depth + 1 < end for end in self.ends] if self.is_after else None


def proposed(draft: Target, stop: StopRule | None, *, draws: Draws = Draws.DETERMINISTIC, params: SamplingParams = SAMPLED):
    """One draft of three rows with at most 6, 6 and 2 guesses."""
    target = tiny_model()
    drafter = DraftModel(draft, vocab_size=VOCAB, draws=draws)
    engine = Engine(target, Method(NullDrafter(), Coupled(), Fixed()))
    batch = engine.start([Request(prompt, params) for prompt in PROMPTS[2:5]])
    state = drafter.start([row.tokens for row in batch.rows], {})
    context: Context = engine._context(batch)
    with torch.inference_mode():
        return drafter.propose(state, context, plan_of([6, 6, 2], 6, None, stop)), state


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("ends", [[6, 6, 2], [3, 1, 2], [1, 1, 1], [2, 5, 1]])
def test_rows_end_where_the_rule_says_and_no_pass_is_wasted(draft, ends: list[int], after: bool) -> None:
    counting = Counting(draft)
    full, _ = proposed(draft, None)
    cut, state = proposed(counting, Script(ends, after=after))
    sizes = [min(end, most) for end, most in zip(ends, (6, 6, 2), strict=True)]
    assert list(cut.num_drafted) == sizes
    for row, size in enumerate(sizes):  # a shorter draft is the beginning of the longer one
        assert cut.tree.tokens[row, : size + 1].tolist() == full.tree.tokens[row, : size + 1].tolist()
    rest = 0 if after else 1  # asked before a guess, the pass that shows its law has been made
    assert counting.num_passes == min(max(sizes) + rest, 6)
    grown = [now - base for now, base in zip(state.cache.lengths, state.base, strict=True)]
    assert all(size - 1 <= fed <= size for fed, size in zip(grown, sizes, strict=True))


def test_a_rule_may_forbid_even_the_first_guess(draft) -> None:
    nothing, _ = proposed(draft, Script([0, 0, 0], after=False))
    assert nothing.num_drafted == (0, 0, 0)
    some, _ = proposed(draft, Script([0, 2, 1], after=False), draws=Draws.IID)
    assert some.num_drafted == (0, 2, 1) and some.q is not None and some.q.shape[1] == 3


@pytest.mark.parametrize("draws", [Draws.DETERMINISTIC, Draws.IID])
@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(max_tokens=24)], ids=["sampled", "greedy"])
def test_the_unsure_guess_is_kept(draft, draws: Draws, params: SamplingParams) -> None:
    """Lemma C: a row that stopped has the guess it stopped for as its last node; the guesses before it were sure."""
    rule = ConfidenceStop([0.5, 0.5, 0.5])
    cut, _ = proposed(draft, rule, draws=draws, params=params)
    full, _ = proposed(draft, None, draws=draws, params=params)
    for row, (size, most) in enumerate(zip(cut.num_drafted, (6, 6, 2), strict=True)):
        sure = [rule.seen[depth][row] >= 0.5 for depth in range(size)]
        assert size >= 1 and all(sure[:-1]) and (size == most or not sure[-1])
        assert cut.tree.tokens[row, : size + 1].tolist() == full.tree.tokens[row, : size + 1].tolist()


def test_beliefs_are_informative_even_when_greedy(draft) -> None:
    """Of a point mass, every probability would be 1 and every entropy 0."""

    class Reader(StopRule):
        def before(self, depth: int, law: Law) -> None:
            assert all(entropy > 0 for entropy in entropy_of(law))

        def after(self, depth: int, law: Law, guesses: torch.Tensor) -> None:
            chances = torch.tensor(probability_of(law, guesses))
            assert ((chances > 0) & (chances < 1)).all()
            torch.testing.assert_close(chances, law.adjusted[:, 0].softmax(-1).amax(-1))

    proposed(draft, Reader(), params=SamplingParams(max_tokens=24))


def test_stopping_rules_shorten_drafts_and_raise_acceptance(target, draft) -> None:
    """They do something: against a fixed length of 12, fewer guesses are wasted."""

    def wasted(policy: Policy) -> float:
        method = Method(DraftModel(draft, vocab_size=VOCAB), Coupled(), policy)
        params = SamplingParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True)
        stats = [state.stats for state in serve(target, method, PROMPTS, params, batch=8)]
        return 1 - sum(s.num_accepted for s in stats) / sum(s.num_drafted for s in stats)

    fixed = wasted(Threshold(ThresholdOptions(threshold=1.0)))
    for policy in (Confidence(ConfidenceOptions(threshold=0.6)), Entropy(), Threshold(ThresholdOptions(threshold=0.5))):
        assert wasted(policy) < fixed - 0.1


def test_threshold_takes_another_predictor(draft) -> None:
    """A trained head would go here: this one is sure of two guesses and no more."""
    calls = iter([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])

    def two(law: Law, guesses: torch.Tensor) -> list[float]:
        return [next(calls)] * guesses.shape[0]

    policy = Threshold(predictor=two)
    cut, _ = proposed(draft, policy.plan(policy.start(3), 3).stop)
    assert cut.num_drafted == (3, 3, 2)  # the third guess is the one that passed the bound, and it is kept


def test_a_drafter_catches_up_after_rounds_without_it(target, draft, expected) -> None:
    """Nothing is drafted for nine rounds of ten; the draft's own cache must follow all the same."""

    class Seldom(Policy):
        def __init__(self) -> None:
            self.num_rounds = 0

        def start(self, num_rows: int):
            return Fixed().start(num_rows)

        def plan(self, state, num_rows: int):
            self.num_rounds += 1
            return plan_of([4 if self.num_rounds % 10 == 0 else 0] * num_rows, 4, None)

        def update(self, state, observation) -> None:
            pass

    for batch in (1, 8):
        method = Method(DraftModel(tiny_model(0.0), vocab_size=VOCAB), Coupled(), Seldom())
        states = serve(target, method, PROMPTS, SamplingParams(max_tokens=24), batch=batch)
        assert tokens(states) == expected["greedy"]
        assert sum(s.stats.num_accepted for s in states) == sum(s.stats.num_tested for s in states) > 0
