"""Medians, with intervals that predict how far a repetition may deviate.

A run is a table of seconds: rounds down, chunks of prompts across. Its time is the sum over chunks of the median over rounds.
So a disturbance of one chunk in one round has no effect.

A speed-up is the ratio of two such times, measured side by side. Its interval resamples the rounds of every chunk, both sides
together, and is widened for their small number. A single speed has nothing to cancel the machine's drift, so its interval
resamples whole rounds and is wider. Resampling five rounds often draws an outlier three times, which real medians hardly meet.
So outliers are first moved to four standard deviations (from the median deviation over all chunks).

Two runs are compared by the lower quartile instead of the median, because disturbances only ever add time. The memory layout of
code and data differs from process to process. That changes speed by a few percent, and no number of rounds in one process shows
it. So several runs of either side are taken as pairs, and the spread of the pairs makes the interval.

    T = sum_c median_r seconds[r, c];    log interval = log m + s (quantiles of resampled log m - log m),
    s = t(df) / 1.96 sqrt(R / (R - 1));
    of n pairs: log interval = mean +- t(n - 1) sd / sqrt(n)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 1000
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % for 1, 2, ... degrees of freedom."""
_WIDEST = 3.0
"""Largest factor by which an interval is widened. For two rounds t would give 6.5, which says nothing."""

_COMPARED = 0.25
"""The quantile over rounds by which two runs are compared."""
FEWEST_PAIRS = 3

Times = Sequence[Sequence[float]]
"""[R][C] seconds: rounds, chunks."""


@dataclass(frozen=True)
class Estimate:
    """A middle value and its 95 % interval."""

    value: float
    low: float
    high: float
    num_rounds: int

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high, "rounds": self.num_rounds}

    @staticmethod
    def from_json(data: dict[str, float]) -> Estimate:
        return Estimate(data["value"], data["low"], data["high"], int(data["rounds"]))


def total(times: Times, quantile: float = 0.5) -> float:
    """Sum over chunks of the median (or another quantile) over rounds."""
    return float(np.quantile(np.asarray(times, float), quantile, axis=0).sum())


def speed_of(num_tokens: int, times: Times) -> Estimate:
    """Tokens per second, where ``num_tokens`` are those of one round. Whole rounds are resampled."""
    table = np.asarray(times, float)
    middle = num_tokens / total(times)
    drawn = num_tokens / _resampled(table, seed=0, by_round=True)
    return _interval(middle, drawn, num_rounds=len(table), freedom=len(table) - 1)


def ratio_of(times: Times, baseline: Times) -> Estimate:
    """The speed-up over the baseline, measured side by side."""
    table = np.asarray(times, float)
    drawn = _ratios(times, baseline, seed=0)
    return _interval(total(baseline) / total(times), drawn, num_rounds=len(table), freedom=_freedom(table))


def quotient_of(new: tuple[Times, Times], old: tuple[Times, Times]) -> Estimate:
    """Ratio of the speed-ups of two runs, each (times, baseline) measured side by side. Above 1, the new run is better."""
    sides = [[total(times, _COMPARED) for times in run] for run in (new, old)]
    middle = (sides[0][1] / sides[0][0]) / (sides[1][1] / sides[1][0])
    drawn = _ratios(*new, seed=1, quantile=_COMPARED) / _ratios(*old, seed=2, quantile=_COMPARED)
    tables = [np.asarray(run[0], float) for run in (new, old)]
    return _interval(middle, drawn, num_rounds=min(map(len, tables)), freedom=min(map(_freedom, tables)))


def pooled(pairs: Sequence[Estimate]) -> Estimate:
    """Mean of the ratios of independent pairs of runs, with an interval from their spread."""
    if len(pairs) == 1:
        return pairs[0]
    logs = np.log([pair.value for pair in pairs])
    middle, reach = float(logs.mean()), _student(len(pairs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(pairs))
    return Estimate(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), sum(p.num_rounds for p in pairs))


def _ratios(times: Times, baseline: Times, *, seed: int, quantile: float = 0.5) -> np.ndarray:
    """Ratios of resampled times. Both sides use the same rounds, because a disturbance of a round affects both."""
    mine, base = (np.asarray(side, float) for side in (times, baseline))
    return _resampled(base, seed=seed, quantile=quantile) / _resampled(mine, seed=seed, quantile=quantile)


def _resampled(table: np.ndarray, *, seed: int, by_round: bool = False, quantile: float = 0.5) -> np.ndarray:
    """[S] totals of tables whose rounds were drawn with replacement, for every chunk separately or for all together."""
    rng = np.random.default_rng(seed)
    table = table if by_round else _tamed(table)
    rounds, chunks = table.shape
    picks = rng.integers(0, rounds, (_RESAMPLES, rounds, 1 if by_round else chunks))
    return np.quantile(np.take_along_axis(table[None], picks, axis=1), quantile, axis=1).sum(-1)


def _tamed(table: np.ndarray) -> np.ndarray:
    """The table with its outliers moved towards the median."""
    middle = np.median(table, axis=0)
    deviation = table / middle - 1
    bound = max(4 * 1.4826 * float(np.median(np.abs(deviation))) * math.sqrt(len(table) / max(1, len(table) - 1)), 1e-3)
    return middle * (1 + deviation.clip(-bound, bound))


def _freedom(table: np.ndarray) -> int:
    return (table.shape[0] - 1) * table.shape[1]


def _interval(middle: float, drawn: np.ndarray, *, num_rounds: int, freedom: int) -> Estimate:
    if num_rounds < 2:  # one round has no spread to show
        return Estimate(middle, middle, middle, num_rounds)
    stretch = min(_student(freedom) / 1.96, _WIDEST) * math.sqrt(num_rounds / (num_rounds - 1))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(middle, middle * (float(low) / middle) ** stretch, middle * (float(high) / middle) ** stretch, num_rounds)


def _student(freedom: int) -> float:
    """Student's t at 97.5 %."""
    return _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.4 / freedom
