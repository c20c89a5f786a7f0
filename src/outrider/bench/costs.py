"""Costs of rounds on this machine for the simulator: passes by size, the rest of a plain round, and drafting.

Passes are measured on their own (``curves``). The host's work (law, walk, commit, statistics) is the time of plain rounds minus
that of their pass. The drafter's work is the additional time of rounds that accept nothing. It is measured at a few lengths,
with straight lines between them. Of repeated measurements the fastest counts, prompt by prompt and size by size, because
disturbances only ever add time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.api import LLM
from outrider.bench.curves import Clock, PassCurve, measure_curves
from outrider.bench.decode import decode
from outrider.bench.tally import Tally
from outrider.core.method import Method
from outrider.core.params import SamplingParams

_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round."""

    verify: PassCurve
    host: float
    """Seconds of a plain round beyond its pass."""
    extra: PassCurve | None = None
    """Further seconds of a round with guesses, by the number of guesses."""

    def seconds(self, length: float) -> float:
        """Seconds of a round of ``length`` guesses."""
        drafting = self.extra.at(length) if self.extra is not None and length else 0.0
        return self.verify.at(length + 1) + self.host + drafting


@dataclass(frozen=True)
class Sample:
    """Short runs of a method, one per prompt."""

    by_prompt: tuple[float, ...]
    """Seconds of each run."""
    tally: Tally

    @property
    def seconds(self) -> float:
        return sum(self.by_prompt)

    @property
    def round_seconds(self) -> float:
        return self.seconds / max(self.tally.num_passes, 1)

    @property
    def guesses(self) -> float:
        """Guesses per round."""
        return self.tally.num_guesses / max(self.tally.num_passes, 1)


def undisturbed(samples: Sequence[Sample]) -> Sample:
    """The fastest time of every prompt among repetitions of the same run."""
    return Sample(tuple(map(min, zip(*(one.by_prompt for one in samples), strict=True))), samples[0].tally)


def pass_curve(
    llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int, repeats: int = 7, clock: Clock = time.perf_counter
) -> PassCurve:
    """Seconds of passes by size, in the middle of texts of this length."""
    context = max(1, min(int(statistics.mean(map(len, prompts))) + max_tokens // 2, llm.target.max_len - 65))
    nodes = [size for size in _LENGTHS if context + size < llm.target.max_len]
    (curve,) = measure_curves(llm.target, nodes=nodes, contexts=(context,), repeats=repeats, clock=clock)
    return curve


def plain_costs(curves: Sequence[PassCurve], plain: Sequence[Sample]) -> RoundCosts:
    """The cost of a plain round, from repeated measurements of passes and of plain decoding."""
    seconds = tuple(map(min, zip(*(curve.seconds for curve in curves), strict=True)))
    curve = replace(curves[0], seconds=seconds)
    return RoundCosts(curve, host=max(0.0, undisturbed(plain).round_seconds - curve.at(1)))


def run_once(
    llm: LLM, method: Method, prompts: Sequence[Sequence[int]], *, max_tokens: int, clock: Clock = time.perf_counter
) -> Sample:
    """Decode every prompt alone, greedily: seconds, and what the rounds reported."""
    taken, tally = list[float](), Tally()
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index)
        done = decode(llm, method, [prompt], [params], clock=clock)
        taken.append(done.seconds)
        tally += done.tally
    return Sample(tuple(taken), tally)


def with_drafter(costs: RoundCosts, samples: Sequence[Sample]) -> RoundCosts:
    """The costs with a drafter, from runs of rising lengths in which nothing was accepted."""
    guesses = tuple(one.guesses for one in samples)
    extra = tuple(one.round_seconds - costs.verify.at(1 + one.guesses) - costs.host for one in samples)
    return replace(costs, extra=PassCurve(costs.verify.context, costs.verify.batch_size, guesses, extra))
