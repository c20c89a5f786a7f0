"""Synthetic acceptance comes out as set and changes no text; the simulator's formulas; predictions of real runs."""

from __future__ import annotations

import json
import time

import pytest

from outrider.api import LLM
from outrider.bench.costs import RoundCosts, Sample, plain_costs, run_once, undisturbed, with_drafter
from outrider.bench.curves import PassCurve
from outrider.bench.simulate import (
    Cluster,
    ModelShape,
    Scenario,
    accepted_law,
    expected_seconds,
    hardware_named,
    predicted_speed,
    tokens_per_pass,
)  # fmt: skip
from outrider.bench.tally import Tally
from outrider.bench.validate import known_texts, synthetic_method, validate
from outrider.bundled import bundled_path
from outrider.cli.main import main
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.drafters.synthetic import SyntheticOptions


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(method="draft-model", draft=bundled_path("draft"), dtype="float32")


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.codec.encode(text) for text in ("Once upon a time", "One day, a boy named Tom", "The little dog")]


def test_the_text_is_plain_decoding_s_whatever_the_rate(llm: LLM, prompts) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = known_texts(llm, prompts, max_tokens=24)
    for rate in (0.0, 0.6, 1.0):
        method = synthetic_method(llm, texts, rate=rate, length=4)
        outputs = llm.generate(prompts, params, method=method)
        assert [[*o.prompt_token_ids, *o.token_ids] for o in outputs] == texts
    wrong = synthetic_method(llm, [text[::-1] for text in texts], rate=1.0, length=4)
    assert [[*o.prompt_token_ids, *o.token_ids] for o in llm.generate(prompts, params, method=wrong)] == texts


@pytest.fixture(scope="module")
def long_texts(llm: LLM, prompts) -> list[list[int]]:
    return known_texts(llm, prompts, max_tokens=150)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 1.0])
def test_the_rate_comes_out(llm: LLM, prompts, long_texts, rate: float) -> None:
    max_tokens = 150 if 0 < rate < 1 else 30
    tally = run_once(llm, synthetic_method(llm, long_texts, rate=rate, length=3), prompts, max_tokens=max_tokens).tally
    assert tally.acceptance == pytest.approx(rate, abs=0.09 if 0 < rate < 1 else 0)


def test_a_round_takes_the_time_its_guesses_are_said_to_take(llm: LLM, prompts) -> None:
    texts = known_texts(llm, prompts, max_tokens=12)
    tally = run_once(llm, synthetic_method(llm, texts, rate=0.0, length=4, seconds=0.002), prompts, max_tokens=12).tally
    assert tally.draft_seconds >= tally.num_guesses * 0.002


def test_bad_options_are_refused() -> None:
    for options in ({"rate": 1.2}, {"rate": ()}, {"seconds_per_guess": -1.0}):
        with pytest.raises(OptionError, match="not valid"):
            SyntheticOptions(**options)


def test_the_law_of_accepted_guesses() -> None:
    assert accepted_law([0.5], 2) == [0.5, 0.25, 0.25]
    assert accepted_law([0.9, 0.5], 3) == pytest.approx([0.1, 0.45, 0.225, 0.225])
    assert accepted_law([], 2) == [1.0, 0.0, 0.0]
    assert tokens_per_pass([0.8], 4) == pytest.approx((1 - 0.8**5) / 0.2)


def test_time_of_a_text_is_the_sum_of_its_rounds() -> None:
    assert expected_seconds(10, 0, [], lambda length: 2.0) == 20.0
    assert expected_seconds(10, 4, [1.0], lambda length: 1.0) == 2.0, "five tokens a round"
    assert expected_seconds(11, 4, [1.0], lambda length: 1.0 + length) == 5.0 + 5.0 + 1.0, "the last round drafts nothing"
    reading = expected_seconds(11, 4, [1.0], lambda length: 1.0 + length, read=0.5)
    assert reading == 5.0 + 0.5 + 5.0 + 1.0, "the draft reads its accepted last guess where it drafts again"
    assert expected_seconds(11, 4, [0.0], lambda length: 1.0, read=0.5) == 11.0, "a rejected guess is not read"
    long = predicted_speed(4000, 3, [0.7], lambda length: 1.0)
    assert long == pytest.approx(tokens_per_pass([0.7], 3), rel=0.01)


def test_costs_of_a_round_add_up() -> None:
    costs = RoundCosts(PassCurve(8, 1, (1, 5), (1.0, 2.0)), host=0.1, extra=PassCurve(8, 1, (1, 5), (0.2, 0.4)))
    assert costs.seconds(0) == pytest.approx(1.1)
    assert costs.seconds(4) == pytest.approx(2.0 + 0.1 + 0.35)


def test_a_drafter_s_costs_are_what_its_rounds_take_beyond_pass_and_host() -> None:
    plain = RoundCosts(PassCurve(8, 1, (1, 9), (1.0, 2.0)), host=0.1)
    short = Sample((10 * (1.125 + 0.1 + 0.3),), Tally(num_passes=10, num_guesses=10))
    long = Sample((10 * (2.0 + 0.1 + 0.65),), Tally(num_passes=10, num_guesses=80))
    slow = Sample((99.0,), short.tally)
    found = with_drafter(plain, [undisturbed([slow, short]), long])
    assert found.seconds(1) == pytest.approx(1.125 + 0.1 + 0.3) and found.seconds(8) == pytest.approx(2.0 + 0.1 + 0.65)
    assert found.seconds(0) == pytest.approx(1.1)
    curves = [PassCurve(8, 1, (1, 9), seconds) for seconds in ((1.0, 5.0), (4.0, 2.0))]
    texts = [Sample(taken, Tally(num_passes=10)) for taken in ((5.5, 9.0), (7.0, 5.5))]
    assert plain_costs(curves, texts).verify.seconds == (1.0, 2.0) and plain_costs(curves, texts).host == pytest.approx(0.1)


def test_a_roofline_has_its_two_sides() -> None:
    cluster, shape = Cluster(hardware_named("h200")), ModelShape(8e9, 32, 131072)
    one, few, many = (cluster.pass_seconds(shape, n, batch_size=1, context=1024) for n in (1, 8, 4096))
    assert few == pytest.approx(one, rel=0.01) and many > 5 * one
    assert 0.0035 < one < 0.006, "an 8B model reads 16 GB a pass"
    spread = Cluster(hardware_named("h200"), 4).pass_seconds(shape, 1, batch_size=1, context=1024)
    assert one / 4 < spread < one
    scenario = Scenario(shape, ModelShape(1e9, 16), cluster)
    assert scenario.best_length([0.9]) > scenario.best_length([0.5]) > 0
    assert Scenario(shape, ModelShape(8e9, 32), cluster).best_length([0.3]) == 0
    with pytest.raises(OptionError, match="did you mean 'h200'"):
        hardware_named("h20")


@pytest.mark.exhaustive  # it measures, and a test that everybody runs depends on no speed
def test_predictions_are_near_what_is_measured(llm: LLM, prompts) -> None:
    """Loosely: the machine that runs tests is busy. The figures of a quiet one are in docs/bench.md."""
    for one in validate(llm, prompts, rates=[0.7], lengths=[3], max_tokens=32, num_rounds=3, clock=time.process_time):
        assert abs(one.error) < 0.4


def test_the_command_line(capsys) -> None:
    assert main(["simulate", "--draft-params", "1e9", "--draft-layers", "16", "--batch-sizes", "1,512"]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert document["rows"][0]["speedup"] > document["rows"][1]["speedup"] > 0
    assert main(["simulate", "--acceptance", "7"]) == 2
