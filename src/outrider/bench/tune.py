"""Finds the best method for a model, a machine and a user's prompts. It predicts speeds from a few probes, then measures the
best.

There are three steps.

1. *Probe.* Every lossless method runs once or twice on some of the prompts. That gives the acceptance by depth and the cost
   of drafting. The cost of passes by size is measured beside it.
2. *Predict.* From these follows the speed of every length of every chain drafter. Trees are predicted at the probed sizes.
3. *Race.* The best few predictions, their neighbours and plain decoding are measured in turns, and the fastest wins. If its
   interval does not exclude 1, the answer is plain.

    speed(K) = (1 + sum_{k <= K} reach_k) / (r(K) (pass(1 + guesses(K)) + draft(K) + host)),  reach_k = accepted at k / rounds
    r(K): measured over modelled seconds of the probed rounds, on a line between the probed lengths
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.api import LLM
from outrider.bench.curves import PassCurve, measure_curves
from outrider.bench.results import Cell, Results
from outrider.bench.runner import RunConfig, Runner
from outrider.bench.settings import BASELINE, Setting, Skipped, runnable
from outrider.bench.stats import Estimate, ratio_of
from outrider.bench.tally import Tally
from outrider.bench.tune_config import TuneConfig
from outrider.core.draft import Shape
from outrider.methods import METHODS

_PROBE_ROUNDS = 2
_CHAIN_PROBES = (2, 8)
_LONGEST = 12
_TREE_PROBES = ({"num_draft_tokens": 4, "num_tree_nodes": 8}, {"num_draft_tokens": 6, "num_tree_nodes": 20})
_SIZES = ("num_draft_tokens", "num_tree_nodes")
_NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 21, 25, 33, 49, 65)
_SUITE = "prompts"
_NEIGHBOUR_RACES = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Forecast:
    """A setting and its predicted speed-up."""

    setting: Setting
    speedup: float


@dataclass(frozen=True)
class Raced:
    """A setting that was measured."""

    setting: Setting
    expected: float | None
    speedup: Estimate
    tokens_per_second: float


@dataclass(frozen=True)
class Tuned:
    """Result of tuning."""

    best: Raced
    raced: list[Raced]
    forecasts: list[Forecast]
    skipped: list[Skipped]
    curve: PassCurve

    @property
    def pays(self) -> bool:
        """Whether speculation is faster beyond the interval of the measurement."""
        return self.best.setting.method != BASELINE


def tune(llm: LLM, prompts: Sequence[list[int]], config: TuneConfig, *, say: Say = lambda _: None) -> Tuned:
    """Probe, predict and race."""
    few = list(prompts[: config.num_probe_prompts])
    settings, skipped = runnable(llm, _probes(config), lambda _: None)
    say(f"probing {len(settings) - 1} settings on {len(few)} prompts")
    probed = _run(llm, settings, few, config, num_rounds=_PROBE_ROUNDS)
    context = min(sum(map(len, few)) // len(few) + config.max_tokens // 2, llm.target.max_len - _NODES[-1] - 1)
    curve = _curve(llm, context, config.batch_size)
    forecasts = forecast(settings, probed, curve, config.batch_size)
    say("expected: " + ", ".join(f"{one.setting.label} {one.speedup:.2f}x" for one in forecasts[:4]))
    raced = _races(llm, prompts, config, forecasts, say=say)
    best = raced[0] if raced[0].setting.method != BASELINE and raced[0].speedup.low > 1 else _plain_of(raced)
    return Tuned(best, raced, forecasts, skipped, curve)


def _plain_of(raced: Sequence[Raced]) -> Raced:
    return next(one for one in raced if one.setting.method == BASELINE)


def _probes(config: TuneConfig) -> list[Setting]:
    found = [Setting(BASELINE)]
    for name in config.methods or METHODS:
        row = METHODS[name]
        if name == BASELINE or not Setting(name).lossless:
            continue
        if row.drafter.shape is Shape.CHAIN:
            found += [Setting(name, options={"num_draft_tokens": length}) for length in _CHAIN_PROBES]
        else:
            own = {option: value for option, value in (row.defaults or {}).items() if option in _SIZES}
            found += [Setting(name, options=options) for options in (own, *_TREE_PROBES)]
    return found


def _run(
    llm: LLM, settings: Sequence[Setting], prompts: Sequence[list[int]], config: TuneConfig, *, num_rounds: int
) -> Results:
    run = RunConfig(
        num_rounds=num_rounds,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        batch_sizes=(config.batch_size,),
        seconds=config.seconds / (1 + _NEIGHBOUR_RACES) if config.seconds and num_rounds > _PROBE_ROUNDS else None,
    )
    return Runner(llm, settings, {_SUITE: list(prompts)}, config=run).run()


def _curve(llm: LLM, context: int, batch_size: int) -> PassCurve:
    (curve,) = measure_curves(llm.target, nodes=_NODES, contexts=(max(1, context),), batch_sizes=(batch_size,), repeats=5)
    return curve


def forecast(settings: Sequence[Setting], probed: Results, curve: PassCurve, batch_size: int) -> list[Forecast]:
    """Predicted speed-ups of all settings that can be predicted, the best first."""
    cells = [probed.cell(setting.label, _SUITE, batch_size) for setting in settings]
    plain = next(cell for cell in cells if cell.setting.method == BASELINE)
    found: list[Forecast] = []
    by_method: dict[str, list[Cell]] = {}
    for cell in cells:
        by_method.setdefault(cell.setting.method, []).append(cell)
    for name, many in by_method.items():
        if name == BASELINE:
            continue
        if METHODS[name].drafter.shape is Shape.CHAIN:
            speeds = _chain_speeds(many, curve, host=_round_seconds(plain) - curve.at(1))
        else:
            speeds = [(cell.setting, _tokens(cell.tally) / _round_seconds(cell)) for cell in many]
        found += [Forecast(setting, speed * _round_seconds(plain)) for setting, speed in speeds]
    return sorted(found, key=lambda one: -one.speedup)


def _round_seconds(cell: Cell) -> float:
    """Seconds of a round, with the fastest time of each chunk. First calls and other programs only ever add time."""
    fastest = [min(times) for times in zip(*cell.times, strict=True)]
    return sum(fastest) * len(cell.times) / max(cell.tally.num_passes, 1)


def _tokens(tally: Tally) -> float:
    """Emitted tokens of a round of one row."""
    return 1 + tally.num_accepted / max(tally.num_rounds, 1)


def _chain_speeds(cells: Sequence[Cell], curve: PassCurve, *, host: float) -> list[tuple[Setting, float]]:
    """Predicted speed of every length of a chain: reach from the longest probe, seconds from a model that is fitted to all
    probes (``_rates``)."""
    long = cells[-1]
    tally = long.tally
    rounds = max(tally.num_rounds, 1)
    drafting = _drafting(cells)

    def model(guesses: float) -> float:
        return curve.at(1 + guesses) + drafting.at(guesses) + host

    rates = PassCurve(curve.context, curve.batch_size, *_rates(cells, model))
    found: list[tuple[Setting, float]] = []
    tokens, guesses = 1.0, 0.0
    for length in range(1, _LONGEST + 1):
        tokens += _share(tally.accepted, length - 1, rounds)
        guesses += _share(tally.drafted, length - 1, rounds)
        setting = replace(long.setting, options={**long.setting.options, "num_draft_tokens": length})
        found.append((setting, tokens / (model(guesses) * rates.at(min(guesses, rates.nodes[-1])))))
    return found


def _drafting(cells: Sequence[Cell]) -> PassCurve:
    """Seconds of drafting by number of guesses: a line through the shortest and the longest probe."""
    short, long = (cells[i].tally for i in (0, -1))
    seconds = [tally.draft_seconds / max(tally.num_passes, 1) for tally in (short, long)]
    lengths = [_mean_depth(tally) for tally in (short, long)]
    per_guess = max(0.0, (seconds[1] - seconds[0]) / (lengths[1] - lengths[0])) if lengths[1] > lengths[0] + 0.1 else 0.0
    fixed = max(0.0, seconds[0] - per_guess * lengths[0])
    return PassCurve(0, 1, (0.0, float(_LONGEST)), (fixed, fixed + per_guess * _LONGEST))


def _rates(cells: Sequence[Cell], model: Callable[[float], float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measured over modelled seconds of a round, at the number of guesses of each probe."""
    by_guesses = {_mean_depth(cell.tally): _round_seconds(cell) for cell in cells}
    guesses = tuple(sorted(by_guesses))
    return guesses, tuple(by_guesses[count] / model(count) for count in guesses)


def _share(counts: Sequence[int], depth: int, rounds: int) -> float:
    """Share of rounds that reach a depth. Beyond the probe it keeps falling as at its end."""
    if not counts:
        return 0.0
    if depth < len(counts):
        return counts[depth] / rounds
    fall = counts[-1] / counts[-2] if len(counts) > 1 and counts[-2] else 0.5
    return counts[-1] / rounds * min(fall, 1.0) ** (depth - len(counts) + 1)


def _mean_depth(tally: Tally) -> float:
    return sum(tally.drafted) / max(tally.num_rounds, 1)


def _races(
    llm: LLM, prompts: Sequence[list[int]], config: TuneConfig, forecasts: Sequence[Forecast], *, say: Say
) -> list[Raced]:
    """Race the best predictions against plain decoding, then the winner against its neighbours as long as a neighbour wins."""
    expected = {one.setting.label: one.speedup for one in forecasts}
    raced = _race(llm, prompts, config, _varied(forecasts, config.num_finalists), expected=expected)
    tried = {one.setting.label for one in raced}
    for _ in range(_NEIGHBOUR_RACES):
        say("measured: " + ", ".join(f"{one.setting.label} {one.speedup.value:.2f}x" for one in raced[:4]))
        winner = next((one for one in raced if one.setting.method != BASELINE), None)
        near = [setting for setting in _neighbours(llm, winner.setting) if setting.label not in tried] if winner else []
        if winner is None or not near:
            break
        expected |= {setting.label: expected.get(setting.label, winner.expected or 0.0) for setting in near}
        latest = _race(llm, prompts, config, [winner.setting, *near], expected=expected)
        tried |= {setting.label for setting in near}
        again = {one.setting.label for one in latest}
        raced = [*latest, *(one for one in raced if one.setting.label not in again)]
        if latest[0].setting.label in (winner.setting.label, BASELINE):
            break
    return raced


def _varied(forecasts: Sequence[Forecast], count: int) -> list[Setting]:
    """The best predictions, at most two of a method, because errors of one method's predictions are correlated."""
    chosen: list[Setting] = []
    for one in forecasts:
        if sum(setting.method == one.setting.method for setting in chosen) < 2:
            chosen.append(one.setting)
        if len(chosen) == count:
            break
    return chosen


def _neighbours(llm: LLM, winner: Setting) -> list[Setting]:
    """Neighbours of a setting: one guess more or fewer, other tree sizes, and the length left to ``adaptive``, with this upper
    bound or the default one."""
    options: dict[str, Any] = dict(winner.options)
    length = options.get("num_draft_tokens", (METHODS[winner.method].defaults or {}).get("num_draft_tokens", 4))
    nodes = options.get("num_tree_nodes")
    near = [replace(winner, options={**options, "num_draft_tokens": other}) for other in (length - 1, length + 1) if other > 0]
    if nodes:
        near += [replace(winner, options={**options, "num_tree_nodes": other}) for other in (nodes // 2, nodes * 2)]
    near.append(replace(winner, policy="adaptive", options={**options, "num_draft_tokens": max(length, 8)}))
    near.append(replace(winner, options={option: value for option, value in options.items() if option not in _SIZES}))
    return runnable(llm, near, lambda _: None)[0]


def _race(
    llm: LLM, prompts: Sequence[list[int]], config: TuneConfig, settings: Sequence[Setting], *, expected: dict[str, float]
) -> list[Raced]:
    """Settings measured in turns, the fastest first."""
    results = _run(llm, [Setting(BASELINE), *settings], prompts, config, num_rounds=config.num_rounds)
    cells = list(results.cells.values())  # plain decoding first; a time limit may have left others out
    raced = [
        Raced(
            cell.setting,
            expected.get(cell.setting.label),
            ratio_of(cell.times, cells[0].times),
            sum(cell.tokens) / sum(map(sum, cell.times)),
        )
        for cell in cells
    ]
    return sorted(raced, key=lambda one: -one.speedup.value)
