"""Rule ``fly``: both forms agree, its loss is what the window lets through, and without a gate it is the exact rule."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from test_lossy_rules import generated, greedy_law, judged_rows
from test_rules_vectorised import assert_forms_agree, case_of
from thinned import thinned_model

from outrider.acceptance.delta import Delta
from outrider.acceptance.discrepancy import tv
from outrider.acceptance.distance import enumerated_law, measure
from outrider.acceptance.fly import Fly, FlyOptions
from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.params import SamplingParams
from outrider.core.random_source import RandomSource
from outrider.methods import compose

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOWS = [0, 1, 2]


def rule(window: int, entropy: float = 0.3, top_k: int = 3) -> Fly:
    return Fly(FlyOptions(fly_entropy=entropy, fly_window=window, fly_top_k=top_k))


@pytest.mark.parametrize("window", WINDOWS)
def test_both_forms_agree_and_more_is_kept(window: int) -> None:
    assert_forms_agree(rule(window), cases=range(40), is_chain=True)
    more = 0
    for seed in range(40):
        case = case_of(seed, is_chain=True)
        mine, exact = (one.walk(case.draft, case.law, case.noise) for one in (rule(window), Delta()))
        assert (mine.num_accepted >= exact.num_accepted).all()
        more += int((mine.num_accepted - exact.num_accepted).sum())
    assert more > 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_gate_that_never_opens_is_the_exact_rule(window: int) -> None:
    for seed in range(20):
        case = case_of(seed, is_chain=True)
        for law in (case.law, greedy_law(case, seed)):
            mine, exact = (one.walk(case.draft, law, case.noise) for one in (rule(window, math.inf), Delta()))
            assert mine.num_accepted.tolist() == exact.num_accepted.tolist()
            assert mine.next_token.tolist() == exact.next_token.tolist()


def test_greedy_refusals_are_taken_back_behind_agreement_alone() -> None:
    """At temperature 0: a kept guess that is not the target's likeliest token has a window of likeliest tokens behind it."""
    taken_back = 0
    for seed in range(60):
        case = case_of(seed, is_chain=True)
        law = greedy_law(case, seed)
        for _, draft, verdict in judged_rows(rule(1, 0.0), case, law):
            agrees = [int(draft.p[node - 1].argmax()) == draft.tokens[node] for node in range(1, len(draft.tokens))]
            greedy = all(float(p.max()) == 1 for p in draft.p)
            for here, behind in pairwise(agrees[: len(verdict.path) + 1]) if greedy else ():
                assert here or behind
                taken_back += not here
    assert taken_back


def test_the_loss_is_what_the_window_lets_through() -> None:
    """Every branch, for a sampled guess and two more behind it: the first token is a guess as often as p or the window says."""
    chance = torch.Generator().manual_seed(5)
    p, q, after, last = (torch.randn(4, generator=chance, dtype=torch.float64).softmax(0) for _ in range(4))

    def draft(source: RandomSource) -> RowDraft:
        guess = source.categorical(q, 1_000_000)
        return RowDraft([0, guess, 1, 2], [-1, 0, 1, 2], torch.stack([p, after, last, last]), None, Draws.DETERMINISTIC)

    goes_along = float(after[1] * last[2])
    for window, behind in ((2, goes_along), (1, float(after[1])), (0, 1.0), (3, 0.0)):
        kept = p + (1 - p) * behind
        refused = q * (1 - kept) / (1 - p)
        expected = q * kept + p * (refused.sum() - refused)
        assert float(tv(enumerated_law(rule(window, 0.0), draft), expected)) < 1e-12
    assert float(tv(enumerated_law(rule(2, math.inf), draft), enumerated_law(Delta(), draft))) < 1e-12


def test_the_gate_reads_the_entropy_of_the_likeliest() -> None:
    sure, torn = torch.tensor([0.97, 0.01, 0.01, 0.01]), torch.tensor([0.4, 0.4, 0.1, 0.1])
    assert rule(1).limit(torch.stack([sure, torn])).tolist() == [math.inf, 0.0]
    assert float(rule(1, 0.7, top_k=1).limit(torn)) == math.inf, "0.4 log 0.4 is 0.37 alone"
    assert float(rule(1, 0.7, top_k=2).limit(torn)) == 0.0
    p = torch.stack([sure, torn]).double()
    assert measure(rule(1), p, p.flip(-1)).tv.max() < 1e-6 < 0.1 < float(measure(rule(0), p, p.flip(-1)).tv.max())


def test_rounds_of_the_engine() -> None:
    """Greedy text becomes another one, in fewer passes; a draft no longer than the window changes nothing."""
    params = SamplingParams(max_tokens=30)
    exact, per_pass = generated(Delta(), params)
    texts, faster = generated(rule(1, 0.0), params)
    assert texts != exact and faster > per_pass
    assert generated(rule(4, 0.0), params)[0] == exact
    assert not Fly.lossless


def test_what_is_not_valid_is_refused() -> None:
    for options, word in (
        (lambda: FlyOptions(fly_entropy=-1.0), "fly_entropy"),
        (lambda: FlyOptions(fly_window=-1), "fly_window"),
        (lambda: FlyOptions(fly_top_k=0), "fly_top_k"),
    ):
        with pytest.raises(OptionError, match=word):
            options()
    with pytest.raises(CompositionError):
        compose("token-recycling", thinned_model(strength=0.35), acceptance="fly")
