"""Validates the simulator: runs synthetic drafters with a given acceptance, and compares their speed with the prediction.

Measurements of costs and runs take turns, several times, and the undisturbed times of each count. The prediction uses the cost
of passes alone, the host's and the drafter's work in rounds that accept nothing, and the acceptance by depth. It uses no time
of the run that it predicts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.acceptance import Coupled
from outrider.api import LLM
from outrider.bench.costs import RoundCosts, Sample, pass_curve, plain_costs, run_once, undisturbed, with_drafter
from outrider.bench.curves import Clock, PassCurve
from outrider.bench.settings import BASELINE
from outrider.bench.simulate import predicted_speed
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.drafters.synthetic import Synthetic, SyntheticOptions
from outrider.policies.fixed import Fixed, FixedOptions

_SECONDS_PER_GUESS = 5e-4
"""Seconds of a synthetic guess: about a tenth of a pass of the bundled target."""


_CALIBRATED = (1, 4, 8)
"""Draft lengths at which rounds that accept nothing are timed."""


@dataclass(frozen=True)
class PredictedSpeed:
    """One setting: tokens per second as predicted and as measured."""

    rate: float
    length: int
    predicted: float
    measured: float
    acceptance: float
    """The measured acceptance rate, beside the given one."""

    @property
    def error(self) -> float:
        """Predicted over measured speed, minus 1."""
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, float]:
        return {**vars(self), "error": self.error}


def synthetic_method(llm: LLM, texts: Sequence[Sequence[int]], *, rate: float, length: int, seconds: float = 0.0) -> Method:
    """A method whose guesses have a given acceptance and cost, for texts known in advance."""
    options = SyntheticOptions(rate=rate, seconds_per_guess=seconds)
    drafter = Synthetic(options, texts=texts, vocab_size=llm.target.vocab_size)
    return Method(drafter, Coupled(), Fixed(FixedOptions(num_draft_tokens=length)))


def known_texts(llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
    """Plain decoding's text after every prompt."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = [llm.generate([list(prompt)], params, method=llm.compose(BASELINE))[0] for prompt in prompts]
    return [[*output.prompt_token_ids, *output.token_ids] for output in outputs]


def validate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    rates: Sequence[float] = (0.5, 0.7, 0.9),
    lengths: Sequence[int] = (2, 3, 6, 8),
    max_tokens: int = 64,
    num_rounds: int = 3,
    clock: Clock = time.perf_counter,
) -> list[PredictedSpeed]:
    """Predict and measure every rate at every length."""
    texts = known_texts(llm, prompts, max_tokens=max_tokens)
    cells = [(rate, length) for rate in rates for length in lengths]
    runs: dict[tuple[float, int], list[Sample]] = {cell: [] for cell in [*cells, *((0.0, length) for length in _CALIBRATED)]}
    curves: list[PassCurve] = []
    plain: list[Sample] = []
    for _ in range(num_rounds):
        curves.append(pass_curve(llm, prompts, max_tokens=max_tokens, clock=clock))
        plain.append(run_once(llm, llm.compose(BASELINE), prompts, max_tokens=max_tokens, clock=clock))
        for (rate, length), samples in runs.items():
            method = synthetic_method(llm, texts, rate=rate, length=length, seconds=_SECONDS_PER_GUESS)
            samples.append(run_once(llm, method, prompts, max_tokens=max_tokens, clock=clock))
    costs = with_drafter(plain_costs(curves, plain), [undisturbed(runs[0.0, length]) for length in _CALIBRATED])
    return [_prediction(cell, undisturbed(runs[cell]), costs, max_tokens=max_tokens) for cell in cells]


def _prediction(cell: tuple[float, int], sample: Sample, costs: RoundCosts, *, max_tokens: int) -> PredictedSpeed:
    rate, length = cell
    predicted = predicted_speed(max_tokens, length, sample.tally.by_depth, costs.seconds)
    measured = len(sample.by_prompt) * max_tokens / sample.seconds
    return PredictedSpeed(rate, length, predicted, measured, sample.tally.acceptance)


def predictions_table(found: Sequence[PredictedSpeed]) -> str:
    rows = [f"{'acceptance':>11}{'K':>4}{'predicted':>11}{'measured':>10}{'error':>8}{'came out':>10}"]
    for one in found:
        rows.append(
            f"{one.rate:>11.2f}{one.length:>4}{one.predicted:>11.1f}{one.measured:>10.1f}{one.error:>8.1%}{one.acceptance:>10.2f}"
        )
    return "\n".join(rows)
