"""The best method for a model, a machine and somebody's prompts: predicted from a few probes, then measured.

Three steps. *Probe*: every lossless row of the table runs once or twice on some of the prompts; that gives how often each
depth is accepted and what drafting costs, beside the measured cost of passes by size. *Predict*: from these, the speed of
every length of every chain drafter, without running it; trees are predicted at the sizes that were probed. *Race*: the best
few predictions, their neighbours and plain decoding are measured in turns, and the fastest wins. If its interval does not
exclude 1, the answer is plain.

    speed(K) = (1 + sum_{k <= K} reach_k) / (pass(1 + guesses(K)) + draft(K) + host),     reach_k = accepted at depth k / rounds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.api import LLM
from outrider.bench.curves import Curve, measure_curves
from outrider.bench.recorder import Tally
from outrider.bench.runner import Cell, Results, RunConfig, Runner
from outrider.bench.settings import BASELINE, Setting, Skipped, runnable
from outrider.bench.stats import Estimate, ratio_of
from outrider.core.draft import Shape
from outrider.methods import METHODS

_CHAIN_PROBES = (2, 8)
_LONGEST = 12
_TREE_PROBES = ({"num_draft_tokens": 4, "num_tree_nodes": 8}, {"num_draft_tokens": 6, "num_tree_nodes": 20})
_NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 21, 25, 33, 49, 65)
_SUITE = "prompts"
_NEIGHBOUR_RACES = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class TuneConfig:
    """How much is tried."""

    methods: Sequence[str] = ()
    """Names of the table; none means every lossless row."""
    max_tokens: int = 64
    temperature: float = 0.0
    batch_size: int = 1
    num_probe_prompts: int = 4
    num_finalists: int = 5
    num_rounds: int = 5
    seconds: float | None = None
    """For all races together, about."""


@dataclass(frozen=True)
class Forecast:
    """A setting and the speed-up expected of it."""

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
    """What came of it."""

    best: Raced
    raced: list[Raced]
    forecasts: list[Forecast]
    skipped: list[Skipped]
    curve: Curve

    @property
    def pays(self) -> bool:
        """Whether speculation is faster beyond doubt."""
        return self.best.setting.method != BASELINE


def tune(llm: LLM, prompts: Sequence[list[int]], config: TuneConfig, *, say: Say = lambda _: None) -> Tuned:
    """Probe, predict, race."""
    few = list(prompts[: config.num_probe_prompts])
    settings, skipped = runnable(llm, _probes(config), lambda _: None)
    say(f"probing {len(settings) - 1} settings on {len(few)} prompts")
    probed = _run(llm, settings, few, config, num_rounds=1)
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
            found += [Setting(name), *(Setting(name, options=options) for options in _TREE_PROBES)]
    return found


def _run(
    llm: LLM, settings: Sequence[Setting], prompts: Sequence[list[int]], config: TuneConfig, *, num_rounds: int
) -> Results:
    run = RunConfig(
        num_rounds=num_rounds,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        batch_sizes=(config.batch_size,),
        seconds=config.seconds / (1 + _NEIGHBOUR_RACES) if config.seconds and num_rounds > 1 else None,
    )
    return Runner(llm, settings, {_SUITE: list(prompts)}, config=run).run()


def _curve(llm: LLM, context: int, batch_size: int) -> Curve:
    (curve,) = measure_curves(llm.target, nodes=_NODES, contexts=(max(1, context),), batch_sizes=(batch_size,), repeats=5)
    return curve


def forecast(settings: Sequence[Setting], probed: Results, curve: Curve, batch_size: int) -> list[Forecast]:
    """Expected speed-ups of every setting that can be predicted, the best first."""
    cells = [probed.cell(setting.label, _SUITE, batch_size) for setting in settings]
    host = _host(next(cell for cell in cells if cell.setting.method == BASELINE))
    base = 1 / (curve.at(1) + host)
    found: list[Forecast] = []
    by_method: dict[str, list[Cell]] = {}
    for cell in cells:
        by_method.setdefault(cell.setting.method, []).append(cell)
    for name, many in by_method.items():
        if name == BASELINE:
            continue
        if METHODS[name].drafter.shape is Shape.CHAIN:
            found += [Forecast(s, speed / base) for s, speed in _chain_speeds(many, curve, host)]
        else:
            found += [Forecast(cell.setting, _tree_speed(cell, curve, host) / base) for cell in many]
    return sorted(found, key=lambda one: -one.speedup)


def _host(cell: Cell) -> float:
    """Seconds of a round that are neither draft nor pass."""
    tally = cell.tally
    return max(0.0, (sum(map(sum, cell.times)) - tally.draft_seconds - tally.verify_seconds) / tally.num_passes)


def _chain_speeds(cells: Sequence[Cell], curve: Curve, host: float) -> list[tuple[Setting, float]]:
    """Every length, from a short and a long probe: reach from the long one, the cost of drafting from both."""
    short, long = cells[0], cells[-1]
    tally = long.tally
    rounds = max(tally.num_rounds, 1)
    drafting = [cell.tally.draft_seconds / max(cell.tally.num_passes, 1) for cell in (short, long)]
    lengths = [_mean_depth(cell.tally) for cell in (short, long)]
    per_guess = max(0.0, (drafting[1] - drafting[0]) / (lengths[1] - lengths[0])) if lengths[1] > lengths[0] + 0.1 else 0.0
    fixed = max(0.0, drafting[0] - per_guess * lengths[0])
    walk = max(host, _host(long))
    found: list[tuple[Setting, float]] = []
    tokens, guesses = 1.0, 0.0
    for length in range(1, _LONGEST + 1):
        tokens += _share(tally.accepted, length - 1, rounds)
        guesses += _share(tally.drafted, length - 1, rounds)
        seconds = curve.at(1 + guesses) + fixed + per_guess * guesses + walk
        found.append((replace(long.setting, options={**long.setting.options, "num_draft_tokens": length}), tokens / seconds))
    return found


def _share(counts: Sequence[int], depth: int, rounds: int) -> float:
    """Share of rounds; beyond the probe, falling on as at its end."""
    if not counts:
        return 0.0
    if depth < len(counts):
        return counts[depth] / rounds
    fall = counts[-1] / counts[-2] if len(counts) > 1 and counts[-2] else 0.5
    return counts[-1] / rounds * min(fall, 1.0) ** (depth - len(counts) + 1)


def _mean_depth(tally: Tally) -> float:
    return sum(tally.drafted) / max(tally.num_rounds, 1)


def _tree_speed(cell: Cell, curve: Curve, host: float) -> float:
    """Of the very tree that was probed, with the measured cost of passes instead of the few that were timed in the probe."""
    tally = cell.tally
    tokens = 1 + tally.num_accepted / max(tally.num_rounds, 1)
    nodes = tally.num_nodes / max(tally.num_rounds, 1)
    return tokens / (curve.at(nodes) + tally.draft_seconds / max(tally.num_passes, 1) + max(host, _host(cell)))


def _races(
    llm: LLM, prompts: Sequence[list[int]], config: TuneConfig, forecasts: Sequence[Forecast], *, say: Say
) -> list[Raced]:
    """The best predictions against plain decoding; then the winner against its neighbours, while a neighbour wins."""
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
    """The best, at most two of a method: predictions of one method err together."""
    chosen: list[Setting] = []
    for one in forecasts:
        if sum(setting.method == one.setting.method for setting in chosen) < 2:
            chosen.append(one.setting)
        if len(chosen) == count:
            break
    return chosen


def _neighbours(llm: LLM, winner: Setting) -> list[Setting]:
    """One guess more or fewer, other tree sizes, and policies that choose the length themselves."""
    options: dict[str, Any] = dict(winner.options)
    length = options.get("num_draft_tokens", (METHODS[winner.method].defaults or {}).get("num_draft_tokens", 4))
    nodes = options.get("num_tree_nodes")
    near = [replace(winner, options={**options, "num_draft_tokens": other}) for other in (length - 1, length + 1) if other > 0]
    if nodes:
        near += [replace(winner, options={**options, "num_tree_nodes": other}) for other in (nodes // 2, nodes * 2)]
    near.append(replace(winner, policy="adaptive", options={**options, "num_draft_tokens": max(length, 8)}))
    return runnable(llm, near, lambda _: None)[0]


def _race(
    llm: LLM, prompts: Sequence[list[int]], config: TuneConfig, settings: Sequence[Setting], *, expected: dict[str, float]
) -> list[Raced]:
    """Measured in turns, the fastest first."""
    results = _run(llm, [Setting(BASELINE), *settings], prompts, config, num_rounds=config.num_rounds)
    cells = [results.cell(s.label, _SUITE, config.batch_size) for s in (Setting(BASELINE), *settings)]
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
