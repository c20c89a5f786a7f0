"""Rule ``unverified``: both forms agree, its loss is the exit's distance, one end is exact, and specee follows its exits."""

from __future__ import annotations

import pytest
import torch
from test_rules_vectorised import case_of
from test_specee import PROMPTS, texts
from thinned import thinned_model

from outrider.acceptance.delta import Delta
from outrider.acceptance.discrepancy import tv
from outrider.acceptance.distance import enumerated_law
from outrider.acceptance.siblings import given_to
from outrider.acceptance.unverified import Unverified, UnverifiedOptions
from outrider.core.draft import Draws
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import RowDraft
from outrider.core.params import SamplingParams
from outrider.core.random_source import RandomSource
from outrider.core.request import Request
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose


@pytest.mark.parametrize("count", [0, 1, 64])
def test_walk_is_walk_row_and_without_trust_the_exact_rule(count: int) -> None:
    rule, kept = Unverified(UnverifiedOptions(num_unverified=count)), 0
    for seed in range(60):
        case = case_of(seed, is_chain=True)
        for batched, scalar in case.verdicts(rule):
            assert batched == scalar, f"seed {seed}"
        mine, exact = (one.walk(case.draft, case.law, case.noise) for one in (rule, Delta()))
        more = mine.num_accepted - exact.num_accepted
        assert (more >= 0).all()
        kept += int(more.sum())
    assert (kept > 0) is (count > 0)


def test_every_guess_but_the_last_is_kept() -> None:
    for seed in range(30):
        case = case_of(seed, is_chain=True)
        verdict = Unverified().walk(case.draft, case.law, case.noise)
        possible = given_to(case.tree, case.law.probs) > 0
        for row, (size, accepted) in enumerate(zip(case.tree.sizes, verdict.num_accepted.tolist(), strict=True)):
            assert accepted >= size - 2 or not possible[row, : size - 2].all()


def test_what_is_lost_is_the_distance_of_the_exit() -> None:
    """Every branch of the scalar rule, for a guess that was continued: the law is the exit's."""
    chance = torch.Generator().manual_seed(3)
    p, q = (torch.randn(5, generator=chance, dtype=torch.float64).softmax(0) for _ in range(2))

    def continued(source: RandomSource) -> RowDraft:
        guess = source.categorical(q, 1_000_000)
        return RowDraft([0, guess, 1], [-1, 0, 1], p.expand(3, -1), None, Draws.DETERMINISTIC)

    for count, expected in ((64, q), (0, p)):
        rule = Unverified(UnverifiedOptions(num_unverified=count))
        law = enumerated_law(rule, continued)
        assert float(tv(law, expected)) < 1e-12 and float(tv(law, rule.one_guess(p[None], q[None]).law[0])) < 1e-12


def test_specee_says_what_its_exits_say() -> None:
    """With an exit that is always trusted, all tokens of a round but the last two are the exit's likeliest."""
    target, exit_layer = thinned_model(strength=0.35), 3
    options = {"exits": str(exit_layer), "threshold": 0.0, "num_draft_tokens": 5}
    method = compose("specee", target, options=options, acceptance="unverified", policy="fixed")
    assert not method.lossless
    prompt, tokens, checked = PROMPTS[3], list[int](), 0
    for step in run(
        Engine(target, method), [Request(prompt, SamplingParams(max_tokens=18, ignore_eos=True))], max_batch_size=1
    ):
        before, tokens = len(tokens), step.state.output_ids
        for place in range(before, len(tokens) - 2):
            text = torch.tensor([[*prompt, *tokens[:place]]])
            hidden = target.exit(TokenTree.chain(text), target.new_cache(1), route=Route.first(exit_layer, target.num_layers))
            assert int(target.logits(hidden)[0, -1].argmax()) == tokens[place]
            checked += 1
    assert checked > 6
    plain, _ = texts(target, "plain")
    assert texts(target, "specee", threshold=1.0, acceptance="unverified")[0] == plain, "nobody is trusted: all is verified"
    assert texts(target, "specee", exits="3", threshold=0.0, acceptance="unverified")[0] != plain


def test_what_is_not_valid_is_refused() -> None:
    with pytest.raises(OptionError, match="num_unverified = -1"):
        UnverifiedOptions(num_unverified=-1)
    with pytest.raises(CompositionError):
        compose("token-recycling", thinned_model(strength=0.35), acceptance="unverified")
