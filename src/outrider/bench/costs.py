"""The costs of rounds on this machine, as the simulator takes them: a pass by size, a plain round's rest, and a drafter's.

Passes are measured on their own (``curves``). The host's work (law, walk, commit, statistics) is what plain rounds take beyond
their pass. The drafter's work is what rounds that accept nothing take beyond both. It is measured at a few lengths, with
straight lines between them. Of repeated measurements the fastest counts, prompt by prompt and size by size, because
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
    """What a plain round takes beyond its pass."""
    extra: PassCurve | None = None
    """What a round with guesses takes beyond that, by the number of guesses."""

    def seconds(self, length: float) -> float:
        """Seconds of a round of ``length`` guesses."""
        drafting = self.extra.at(length) if self.extra is not None and length else 0.0
        return self.verify.at(length + 1) + self.host + drafting


@dataclass(frozen=True)
class Sample:
    """Short runs of a method, one per prompt."""

    by_prompt: tuple[float, ...]
    """Seconds."""
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
    """Every prompt at its fastest among repetitions of the same run."""
    return Sample(tuple(map(min, zip(*(one.by_prompt for one in samples), strict=True))), samples[0].tally)


def pass_curve(
    llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int, repeats: int = 7, clock: Clock = time.perf_counter
) -> PassCurve:
    """Seconds of passes by size, in the middle of such texts."""
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
    """The same with what runs of a drafter took in which nothing was accepted, at rising lengths."""
    guesses = tuple(one.guesses for one in samples)
    extra = tuple(one.round_seconds - costs.verify.at(1 + one.guesses) - costs.host for one in samples)
    return replace(costs, extra=PassCurve(costs.verify.context, costs.verify.batch_size, guesses, extra))
