"""Lossy rules: both forms agree, the loss is what the closed form says and within its bound, and the lossless end is exact."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from test_rules_vectorised import VOCAB_SIZE, Case, assert_forms_agree, case_of, law_of, random_law
from tiers import repeats
from tiny_pair import VOCAB, tiny_model
from toy_laws import Experiment, arbitrary, by_draws, chain, distance, grow, mean_emitted, toy_pair

from outrider.acceptance.delta import Delta
from outrider.acceptance.discrepancy import js, kl, tv, w1
from outrider.acceptance.distance import enumerated_law, measure, one_guess_draft
from outrider.acceptance.divergence import Divergence, DivergenceOptions
from outrider.acceptance.lenient import Lenient, LenientOptions
from outrider.acceptance.lossy import LossyRule, judged_law
from outrider.acceptance.rejection import Rejection
from outrider.acceptance.threshold import ThresholdRule, ThresholdRuleOptions
from outrider.acceptance.top_k_rule import TopK, TopKOptions
from outrider.acceptance.typical import TypicalAcceptance, TypicalOptions
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.random_source import NoiseSource, RandomSource
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.core.verdict import RowVerdict
from outrider.drafters.model.draft_model import DraftModel
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.policies.fixed import Fixed, FixedOptions

EXACT = 1e-12
EMBEDDINGS = torch.randn(VOCAB_SIZE, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
RULES: dict[str, LossyRule] = {
    "typical": TypicalAcceptance(),
    "typical-strict": TypicalAcceptance(TypicalOptions(epsilon=0.3, delta=0.9)),
    "lenient": Lenient(),
    "lenient-0.2": Lenient(LenientOptions(lenience=0.2)),
    "top-1": TopK(TopKOptions(accept_top_k=1)),
    "top-2": TopK(),
    "top-all": TopK(TopKOptions(accept_top_k=99)),
    "threshold-single": ThresholdRule(ThresholdRuleOptions(threshold_single=0.3)),
    "threshold-acc": ThresholdRule(ThresholdRuleOptions(threshold_acc=0.6)),
    "threshold-both": ThresholdRule(ThresholdRuleOptions(threshold_single=0.4, threshold_acc=0.7)),
    "js": Divergence(),
    "kl": Divergence(DivergenceOptions(divergence="kl", divergence_threshold=0.5)),
    "tv": Divergence(DivergenceOptions(divergence="tv", divergence_threshold=0.4)),
    "w1": Divergence(DivergenceOptions(divergence="w1", divergence_threshold=0.2, embeddings=EMBEDDINGS)),
}
LOSSLESS_ENDS: dict[str, tuple[LossyRule, AcceptanceRule | None]] = {
    "typical": (TypicalAcceptance(TypicalOptions(epsilon=math.inf, delta=math.inf)), None),  # keeps nothing: plain decoding
    "lenient": (Lenient(LenientOptions(lenience=1.0)), Rejection()),
    "top-0": (TopK(TopKOptions(accept_top_k=0)), Delta()),
    "threshold": (ThresholdRule(), Delta()),
    **{
        name: (Divergence(DivergenceOptions(divergence=name, divergence_threshold=0.0, embeddings=EMBEDDINGS)), Rejection())
        for name in ("js", "kl", "tv", "w1")
    },
}
SHAPES = [
    (name, is_chain) for name, rule in RULES.items() for is_chain in (True, False) if is_chain or rule.shape is Shape.TREE
]

pytestmark = pytest.mark.usefixtures("one_thread")


def greedy_law(case: Case, seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """Some rows at temperature 0 among others, from random logits."""
    rows = [RequestState.of(Request([0], SamplingParams(temperature=float(i % 2)))) for i in range(len(case.sizes))]
    logits = torch.randn(*case.tree.tokens.shape, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return Sampler(rows, VOCAB_SIZE, torch.device("cpu")).law(logits, case.tree, case.noise)


def judged_rows(rule: Any, case: Case, law: Any) -> Iterator[tuple[int, RowDraft, RowVerdict]]:
    """Every row with its verdict, which is the same in the rule's two forms."""
    verdict, judged = rule.walk(case.draft, law, case.noise), judged_law(law)
    for row, size in enumerate(case.sizes):
        draft = RowDraft.of(case.draft, law, row)
        scalar = rule.judge_row(draft, judged[row, :size], case.sources[row])
        assert verdict.rows[row] == scalar, f"row {row}"
        yield row, draft, scalar


# --- both forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "is_chain"), SHAPES)
def test_walk_is_walk_row(name: str, is_chain: bool) -> None:
    cases = repeats(30, of=30 if name == "w1" else 80)  # a transport plan for every single node is slow
    assert_forms_agree(RULES[name], cases=cases, is_chain=is_chain)


@pytest.mark.parametrize(("name", "is_chain"), SHAPES)
def test_walk_in_float32(name: str, is_chain: bool) -> None:
    cases = [case_of(seed, is_chain=is_chain, dtype=torch.float32) for seed in repeats(6, of=40)]
    pairs = [pair for case in cases for pair in case.verdicts(RULES[name])]
    assert sum(batched == scalar for batched, scalar in pairs) >= len(pairs) - 1


@pytest.mark.parametrize(("name", "is_chain"), SHAPES)
def test_temperature_0_is_judged_by_the_softmax(name: str, is_chain: bool) -> None:
    """Greedy rows beside sampled ones; the scalar form is given the same judged law."""
    rule, relaxed = RULES[name], 0
    for seed in repeats(20, of=40):
        case = case_of(seed, is_chain=is_chain)
        law = greedy_law(case, seed)
        for row, one_row, scalar in judged_rows(rule, case, law):
            nodes = [0, *scalar.path]
            said = [*(one_row.tokens[node] for node in scalar.path), scalar.next_token]
            if row % 2 == 0:  # temperature 0: what is drawn is the argmax, what is kept may be another token
                assert scalar.next_token == int(law.adjusted[row, nodes[-1]].argmax())
                relaxed += any(token != int(law.adjusted[row, node].argmax()) for node, token in zip(nodes, said, strict=True))
    if name in ("lenient", "lenient-0.2", "top-2", "top-all", "threshold-single"):
        assert relaxed
    elif name in ("typical", "typical-strict", "top-1", "threshold-acc"):
        assert not relaxed  # these leave greedy text alone


@pytest.mark.parametrize("name", ["js", "kl", "tv"])
def test_divergences_leave_greedy_text_alone(name: str) -> None:
    """At temperature 0 the draft's law is a point mass too."""
    p, q = (torch.eye(VOCAB_SIZE, dtype=torch.float64)[tokens] for tokens in ([0, 1, 2, 3], [0, 2, 2, 4]))
    loss = measure(RULES[name], p, q)
    assert loss.tv.tolist() == [0, 0, 0, 0] and loss.kept.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_nothing_drafted(name: str, batch_size: int) -> None:
    rule = RULES[name]
    tree = TokenTree.chain(torch.zeros(batch_size, 1, dtype=torch.int64))
    noise = Noise(torch.arange(batch_size), torch.zeros(batch_size, dtype=torch.int64))
    law = law_of(random_law(random.Random(0), batch_size, kind="full")[:, None], tree, noise)
    draft = Draft(tree, rule.exact_for[0])
    verdict = rule.walk(draft, law, noise)
    assert not verdict.rejected.any()
    for row in range(batch_size):
        scalar = rule.walk_row(RowDraft.of(draft, law, row), NoiseSource(noise, row))
        assert verdict.rows[row] == scalar and not scalar.path


@dataclass
class BareLaw:
    """What a lossy rule reads of a law."""

    probs: torch.Tensor
    logits: torch.Tensor
    adjusted: torch.Tensor


@pytest.mark.parametrize(("name", "is_chain"), SHAPES)
def test_walk_stays_on_the_device(name: str, is_chain: bool) -> None:
    """Tensors without data: an operation that waits for a value raises."""
    for seed in repeats(1, of=3):
        case, meta = case_of(seed, is_chain=is_chain), torch.device("meta")
        q = None if case.draft.q is None else case.draft.q.to(meta)
        probs = case.law.probs.to(meta)
        law: Any = BareLaw(probs, probs, probs)
        noise = Noise(case.noise.seeds.to(meta), case.noise.positions.to(meta))
        verdict = RULES[name].walk(Draft(case.tree.to(meta), Draws.IID, q), law, noise)
        assert verdict.next_token.shape == (case.tree.batch_size,)


# --- the lossless ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("name", LOSSLESS_ENDS)
def test_the_lossless_end_is_the_exact_rule_number_for_number(name: str, is_chain: bool) -> None:
    rule, exact = LOSSLESS_ENDS[name]
    if exact is None or (exact.shape is Shape.CHAIN and not is_chain):
        pytest.skip("no exact rule to compare with on this shape; see the enumeration")
    for seed in repeats(8, of=50):
        case = case_of(seed, is_chain=is_chain)
        for law in (case.law, greedy_law(case, seed)):
            mine, other = rule.walk(case.draft, law, case.noise), exact.walk(case.draft, law, case.noise)
            for row in range(len(case.sizes)):
                assert mine.rows[row] == other.rows[row]


@pytest.mark.parametrize("flavour", ["random", "target cut to two", "draft cut to two", "greedy target", "draft equals target"])
@pytest.mark.parametrize("name", LOSSLESS_ENDS)
def test_the_lossless_end_is_lossless(name: str, flavour: str) -> None:
    """By enumeration of whole texts, as for the exact rules."""
    rule = LOSSLESS_ENDS[name][0]
    shapes = [chain(2), [-1, 0, 0, 1]] if rule.shape is Shape.TREE else [chain(2)]
    for draws in rule.exact_for:
        for parents in shapes:
            pair = toy_pair(flavour, 1, 3)
            assert distance(rule, Experiment(pair, grow(pair, parents, draws, by_draws(pair, draws)), 3)) < EXACT


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_lossless_would_be_a_lie(name: str) -> None:
    """Over whole texts the law is not the target's, and more guesses are kept than its lossless end keeps."""
    rule = RULES[name]
    worst, gains = 0.0, []
    ends = {TypicalAcceptance: "typical", Lenient: "lenient", TopK: "top-0", ThresholdRule: "threshold", Divergence: "js"}
    for seed in repeats(2, of=8):
        pair = toy_pair("random", seed, 3)
        draws = rule.exact_for[0]
        experiment = Experiment(pair, grow(pair, chain(2), draws, by_draws(pair, draws)), 3)
        worst = max(worst, distance(rule, experiment))
        gains.append(mean_emitted(rule, experiment) - mean_emitted(LOSSLESS_ENDS[ends[type(rule)]][0], experiment))
    assert not type(rule).lossless
    assert worst > 0.01
    assert min(gains) > -EXACT and max(gains) > 0


def laws(seed: int, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    chance = random.Random(seed)
    rows = [random_law(chance, 2, kind=chance.choice(["full", "full", "cut"])) for _ in range(count)]
    p, q = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    near = torch.tensor([chance.choice([0.0, 0.6, 0.95, 1.0]) for _ in rows], dtype=torch.float64)[:, None]
    return p, near * p + (1 - near) * q


def enumerated_tv(rule: AcceptanceRule, p: torch.Tensor, q: torch.Tensor) -> float:
    """One-step loss of ``rule`` on the laws ``p`` and ``q`` [V], with one guess x ~ q."""
    return float(tv(enumerated_law(rule, one_guess_draft(rule, p, q)), p.double()))


@pytest.mark.parametrize("name", [*RULES, *LOSSLESS_ENDS])
def test_the_closed_form_is_the_enumeration(name: str) -> None:
    rule = RULES[name] if name in RULES else LOSSLESS_ENDS[name][0]
    p, q = laws(3, len(repeats(3, of=8 if name == "w1" else 20)))
    outcome, loss = rule.one_guess(p, q), measure(rule, p, q, name=name)
    for i in range(len(p)):
        torch.testing.assert_close(outcome.law[i], enumerated_law(rule, one_guess_draft(rule, p[i], q[i])), atol=1e-12, rtol=0)
        assert float(loss.tv[i]) == pytest.approx(enumerated_tv(rule, p[i], q[i]), abs=1e-12)
    assert f"{name}: one-step TV mean" in str(loss)


@pytest.mark.parametrize("name", RULES)
def test_no_rule_gains_more_than_it_loses(name: str) -> None:
    """A kept guess is the emitted token, so kept <= 1 - TV(q, out) <= 1 - TV(p, q) + TV(out, p); divergences attain it."""
    loss = measure(RULES[name], *laws(11, 200))
    assert (loss.kept <= loss.exact_kept + loss.tv + EXACT).all()
    if isinstance(RULES[name], Divergence):
        torch.testing.assert_close(loss.kept, loss.exact_kept + loss.tv, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", [Rejection(), Delta()])
def test_an_exact_rule_loses_nothing(rule: AcceptanceRule) -> None:
    for p, q in zip(*laws(4), strict=True):
        assert enumerated_tv(rule, p, q) < EXACT


@pytest.mark.parametrize("lenience", [0.1, 0.5, 0.9, 1.0])
def test_lenience_bounds_every_token(lenience: float) -> None:
    """out(x) <= p(x) / l, and TV <= 1 - l; also along a chain, where the bound is p(text) / l^length."""
    rule = Lenient(LenientOptions(lenience=lenience))
    p, q = laws(5, 300)
    outcome = rule.one_guess(p, q)
    assert (outcome.law <= p / lenience + EXACT).all()
    assert (measure(rule, p, q).tv <= 1 - lenience + EXACT).all()
    assert (outcome.kept >= torch.minimum(p, q).sum(-1) - EXACT).all()


@pytest.mark.parametrize(("single", "acc"), [(0.2, 1.0), (1.0, 0.3), (0.7, 0.5)])
def test_thresholds_bound_the_loss(single: float, acc: float) -> None:
    rule = ThresholdRule(ThresholdRuleOptions(threshold_single=single, threshold_acc=acc))
    assert (measure(rule, *laws(6, 300)).tv <= max(1 - single, 1 - acc) + EXACT).all()


@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.4])
def test_divergences_bound_the_loss(threshold: float) -> None:
    p, q = laws(7, 300)
    for name, bound in (("tv", threshold), ("kl", math.sqrt(threshold / 2)), ("js", math.sqrt(2 * threshold))):
        rule = Divergence(DivergenceOptions(divergence=name, divergence_threshold=threshold))
        loss = measure(rule, p, q)
        assert (loss.tv <= bound + EXACT).all()
        assert loss.tv.max() > 0


def test_typical_takes_the_longest_path_and_the_likelier_of_two() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]] * 5, dtype=torch.float64)
    row = RowDraft([0, 2, 1, 0, 1], [-1, 0, 0, 1, 2], p, None, Draws.DETERMINISTIC)
    noise = NoiseSource(Noise(torch.tensor([0]), torch.tensor([0])))
    assert TypicalAcceptance().walk_row(row, noise).path == (1, 3)  # 0.2 * 0.5 against 0.3 * 0.3
    even = RowDraft([0, 2, 1, 1, 1], [-1, 0, 0, 1, 2], p, None, Draws.DETERMINISTIC)
    assert TypicalAcceptance().walk_row(even, noise).path == (2, 4)


def test_typical_asks_more_where_the_target_is_sure() -> None:
    sure, unsure = torch.tensor([0.97, 0.02, 0.01]), torch.full((1000,), 0.001, dtype=torch.float64)
    assert float(TypicalAcceptance().limit(sure)) == pytest.approx(0.09)
    assert float(TypicalAcceptance().limit(unsure)) == pytest.approx(0.0003)


def test_trees_with_arbitrary_guesses_have_a_law() -> None:
    """Duplicate siblings and ragged trees: the branches add up, and a gate on the elder never skips it."""
    for name in ("typical", "top-2", "threshold-both"):
        for seed in range(4):
            pair = toy_pair("random", seed, 3)
            drafter = grow(pair, [-1, 0, 0, 1, 1, 3], Draws.DETERMINISTIC, arbitrary(pair, seed))
            assert distance(RULES[name], Experiment(pair, drafter, 3)) <= 1


# --- distances of laws ------------------------------------------------------------------------------------------------


def test_distances_of_laws() -> None:
    p, q = laws(8, 200)
    assert torch.equal(tv(p, p), torch.zeros(200)) and float(js(p, p).abs().max()) < 1e-15 and float(kl(p, p).max()) == 0
    assert (tv(p, q) <= (kl(p, q) / 2).sqrt() + EXACT).all() and (tv(p, q) <= (2 * js(p, q)).sqrt() + EXACT).all()
    assert (js(p, q) <= math.log(2) + EXACT).all()
    disjoint = torch.eye(2, dtype=torch.float64)
    assert float(kl(disjoint[0], disjoint[1])) == math.inf and float(js(disjoint[0], disjoint[1])) == pytest.approx(math.log(2))


def test_w1_is_between_the_bounds_that_are_known() -> None:
    """At most TV; at least what any 1-Lipschitz function sees; exact for two tokens; 0 between words that mean the same."""
    p, q = laws(9, 200)
    unit = torch.nn.functional.normalize(EMBEDDINGS, dim=-1)
    cost = torch.cdist(unit, unit) / 2
    found = w1(p, q, embeddings=EMBEDDINGS, support=VOCAB_SIZE)
    assert (found <= tv(p, q) + EXACT).all()
    lower = ((p - q) @ cost).abs().amax(-1)  # f(y) = cost(x, y), for every x
    assert (found >= lower - 1e-9).all()
    two = [torch.tensor([law], dtype=torch.float64) for law in ([0.7, 0.3], [0.2, 0.8])]
    assert float(w1(*two, embeddings=EMBEDDINGS, support=2)) == pytest.approx(0.5 * float(cost[0, 1]), abs=1e-9)
    same = torch.ones(VOCAB_SIZE, 3, dtype=torch.float64)
    assert float(w1(p, q, embeddings=same, support=VOCAB_SIZE).max()) < 1e-6
    narrow = w1(p, q, embeddings=EMBEDDINGS, support=1)
    assert (narrow >= found - 1e-3).all()


# --- in the engine ----------------------------------------------------------------------------------------------------


def generated(rule: AcceptanceRule, params: SamplingParams) -> tuple[list[list[int]], float]:
    """Texts of the small random pair, in one batch, and tokens per pass."""
    target = tiny_model()
    drafter = DraftModel(tiny_model(0.3), vocab_size=VOCAB, draws=rule.exact_for[0])
    engine = Engine(target, Method(drafter, rule, Fixed(FixedOptions(num_draft_tokens=4))))
    requests = [Request([1 + i, 2, 3], params) for i in range(6)]
    done = {step.request: step.state for step in run(engine, requests, max_batch_size=6)}
    stats = [state.stats for state in done.values()]
    return [done[i].output_ids for i in range(6)], sum(s.num_tokens for s in stats) / sum(s.num_passes for s in stats)


SEEDED = SamplingParams(max_tokens=12, temperature=1.0, seed=3)


@cache
def exact_per_pass(draws: Draws) -> float:
    """Tokens per pass of the exact rule for guesses that are drawn so."""
    return generated(Rejection() if draws is Draws.IID else Delta(), SEEDED)[1]


@pytest.mark.parametrize("name", RULES)
def test_rounds_of_the_engine(name: str) -> None:
    """A lossy rule composes with a drafter, ends texts in time, and is no slower than the exact rule of its kind."""
    if name == "w1":
        pytest.skip("its embeddings are of another vocabulary")
    texts, per_pass = generated(RULES[name], SEEDED)
    assert all(len(text) == 12 for text in texts)
    assert per_pass > 0.97 * exact_per_pass(RULES[name].exact_for[0])


def test_greedy_text_changes_only_where_the_rule_says_so() -> None:
    params, short = SamplingParams(max_tokens=30), SamplingParams(max_tokens=12)
    greedy, per_pass = generated(Rejection(), params)
    for name in ("lenient", "top-2", "threshold-single"):
        texts, faster = generated(RULES[name], params)
        assert texts != greedy and faster > per_pass, name
    begun = [text[:12] for text in greedy]
    for name in ("typical", "top-1", "threshold-acc", "js", "kl", "tv"):
        assert generated(RULES[name], short)[0] == begun, name
    for rule, _ in LOSSLESS_ENDS.values():
        if not isinstance(rule, Divergence) or rule.options.divergence != "w1":
            assert generated(rule, short)[0] == begun


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (lambda: LenientOptions(lenience=0), "lenience"),
        (lambda: LenientOptions(lenience=1.5), "lenience"),
        (lambda: TypicalOptions(epsilon=0), "epsilon"),
        (lambda: TypicalOptions(delta=-1), "delta"),
        (lambda: TopKOptions(accept_top_k=-1), "accept_top_k"),
        (lambda: TopKOptions(accept_top_k=1.5), "accept_top_k"),  # type: ignore[arg-type]
        (lambda: ThresholdRuleOptions(threshold_acc=0), "threshold_acc"),
        (lambda: ThresholdRuleOptions(threshold_single=2), "threshold_single"),
        (lambda: DivergenceOptions(divergence="jss"), "did you mean 'js'"),
        (lambda: DivergenceOptions(divergence="w1"), "embeddings"),
        (lambda: DivergenceOptions(divergence_threshold=-0.1), "divergence_threshold"),
        (lambda: DivergenceOptions(divergence_threshold=math.nan), "divergence_threshold"),
    ],
)
def test_bad_options_are_refused(options: Any, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        options()


def test_enumeration_of_any_draft() -> None:
    """The enumerating form takes any tree: two chosen siblings under the top-k rule with k = 1."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).expand(3, -1)

    def draft(source: RandomSource) -> RowDraft:
        return RowDraft([0, 1, 0], [-1, 0, 0], p, None, Draws.DETERMINISTIC)

    law = enumerated_law(TopK(TopKOptions(accept_top_k=1)), draft)
    torch.testing.assert_close(law, torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64))
