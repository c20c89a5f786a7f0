"""The costs of rounds on this machine, as the simulator takes them: a pass by size, drafting by length, and the rest.

Passes are measured on their own (``curves``), as means, since the time of a text is a sum; what a round costs besides (the
sampler's law, the walk, the commit, statistics) and what a drafter costs are read off short real runs, since only real runs
have them: two lengths give a fixed part and a part per guess.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.api import LLM
from outrider.bench.curves import Curve, measure_curves
from outrider.bench.recorder import Tally, recorded
from outrider.bench.runner import decode
from outrider.bench.settings import BASELINE
from outrider.core.method import Method
from outrider.core.params import SamplingParams

_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round."""

    verify: Curve
    host: float
    """Of a plain round, all that is neither draft nor pass."""
    host_per_guess: float = 0.0
    """What every further node adds to it."""
    draft: float = 0.0
    """Of a round's drafting, whatever its length."""
    draft_per_guess: float = 0.0

    def seconds(self, length: int, num_nodes: int | None = None) -> float:
        """Of a round of ``length`` guesses along a path, ``num_nodes`` in all (as many if not given)."""
        nodes = length if num_nodes is None else num_nodes
        drafting = self.draft + self.draft_per_guess * length if length else 0.0
        return self.verify.at(nodes + 1) + self.host + self.host_per_guess * nodes + drafting


def measure_costs(llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int, repeats: int = 7) -> RoundCosts:
    """Of plain rounds; a drafter's costs are added by ``with_drafter``."""
    context = min(int(statistics.mean(map(len, prompts))) + max_tokens // 2, llm.target.max_len - 65)
    nodes = [size for size in _LENGTHS if context + size < llm.target.max_len]
    (curve,) = measure_curves(llm.target, nodes=nodes, contexts=(context,), repeats=repeats, middle=statistics.fmean)
    seconds, tally = run_once(llm, llm.compose(BASELINE), prompts, max_tokens=max_tokens)
    return RoundCosts(curve, host=(seconds - tally.verify_seconds) / tally.num_passes)


def run_once(
    llm: LLM, method: Method, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float = 0.0
) -> tuple[float, Tally]:
    """Decode every prompt alone: seconds, and what the rounds reported."""
    watched, recorder = recorded(method)
    total = 0.0
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=index)
        total += decode(llm, watched, [prompt], [params]).seconds
    return total - recorder.tally.own_seconds, recorder.tally


@dataclass(frozen=True)
class Sample:
    """A run of a drafter at one length."""

    seconds: float
    tally: Tally

    @property
    def guesses(self) -> float:
        """Per round."""
        return self.tally.num_guesses / max(self.tally.num_passes, 1)

    @property
    def drafting(self) -> float:
        return self.tally.draft_seconds / max(self.tally.num_passes, 1)

    @property
    def host(self) -> float:
        tally = self.tally
        return (self.seconds - tally.draft_seconds - tally.verify_seconds) / max(tally.num_passes, 1)


def with_drafter(costs: RoundCosts, short: Sample, long: Sample, *, lengths: tuple[int, int]) -> RoundCosts:
    """The same with what runs of a drafter at two lengths showed."""
    more = max(lengths[1] - lengths[0], 1)
    per_guess = max(0.0, (long.drafting - short.drafting) / more)
    wider = max(long.guesses - short.guesses, 1e-9)
    return RoundCosts(
        costs.verify,
        costs.host,
        host_per_guess=max(0.0, (long.host - costs.host) / max(long.guesses, wider)),
        draft=max(0.0, short.drafting - per_guess * lengths[0]),
        draft_per_guess=per_guess,
    )
