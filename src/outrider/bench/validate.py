"""Does the simulator predict what is measured? Synthetic drafters of set acceptance, run here, against their predictions.

Costs and runs take turns, so that a machine that slows down slows both, and are compared round by round. The prediction uses
the cost of passes measured on their own, the host's and the drafter's work measured in rounds that accept nothing, and the
acceptance; no time of the run it predicts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.acceptance import Coupled
from outrider.api import LLM
from outrider.bench.costs import RoundCosts, Sample, measure_costs, run_once, with_drafter
from outrider.bench.curves import Clock
from outrider.bench.settings import BASELINE
from outrider.bench.simulate import predicted_speed
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.drafters.synthetic import Synthetic, SyntheticOptions
from outrider.policies.fixed import Fixed, FixedOptions

_SECONDS_PER_GUESS = 5e-4
"""What a synthetic guess takes: about a tenth of a pass of the bundled target."""


_CALIBRATED = (1, 4, 8)
"""Lengths at which rounds that accept nothing are timed."""


@dataclass(frozen=True)
class Prediction:
    """One setting: tokens per second as predicted and as measured."""

    rate: float
    length: int
    predicted: float
    measured: float
    acceptance: float
    """As it came out, of the rate that was set."""
    error: float
    """Predicted over measured less 1, the median of rounds measured together."""


def synthetic_method(llm: LLM, texts: Sequence[Sequence[int]], *, rate: float, length: int, seconds: float = 0.0) -> Method:
    """Guesses of a set acceptance and cost for texts known beforehand."""
    options = SyntheticOptions(rate=rate, seconds_per_guess=seconds)
    drafter = Synthetic(options, texts=texts, vocab_size=llm.target.vocab_size)
    return Method(drafter, Coupled(), Fixed(FixedOptions(num_draft_tokens=length)))


def known_texts(llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
    """What plain decoding writes after every prompt."""
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
) -> list[Prediction]:
    """Every rate at every length."""
    texts = known_texts(llm, prompts, max_tokens=max_tokens)
    cells = [(rate, length) for rate in rates for length in lengths]
    runs: dict[tuple[float, int], list[Sample]] = {cell: [] for cell in cells}
    costs: list[RoundCosts] = []

    def sample(rate: float, length: int) -> Sample:
        method = synthetic_method(llm, texts, rate=rate, length=length, seconds=_SECONDS_PER_GUESS)
        return run_once(llm, method, prompts, max_tokens=max_tokens, clock=clock)

    for _ in range(num_rounds):
        plain = measure_costs(llm, prompts, max_tokens=max_tokens, repeats=7, clock=clock)
        costs.append(with_drafter(plain, [sample(0.0, length) for length in _CALIBRATED]))
        for rate, length in cells:
            runs[rate, length].append(sample(rate, length))
    num_tokens = len(prompts) * max_tokens
    found: list[Prediction] = []
    for (rate, length), samples in runs.items():
        acceptance = sum(sum(one.tally.accepted) for one in samples) / max(1, sum(sum(one.tally.tested) for one in samples))
        predicted = [predicted_speed(max_tokens, length, [acceptance], cost.seconds) for cost in costs]
        speeds = [num_tokens / one.seconds for one in samples]
        error = statistics.median(a / b for a, b in zip(predicted, speeds, strict=True)) - 1
        middle = statistics.median(predicted), statistics.median(speeds)
        found.append(Prediction(rate, length, *middle, acceptance, error))
    return found


def predictions_table(found: Sequence[Prediction]) -> str:
    rows = [f"{'acceptance':>11}{'K':>4}{'predicted':>11}{'measured':>10}{'error':>8}{'came out':>10}"]
    for one in found:
        rows.append(
            f"{one.rate:>11.2f}{one.length:>4}{one.predicted:>11.1f}{one.measured:>10.1f}{one.error:>8.1%}{one.acceptance:>10.2f}"
        )
    return "\n".join(rows)
