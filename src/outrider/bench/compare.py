"""Compares two bench files line by line: is the newer run slower?

Two figures of every setting are compared.

- *Speed-up* is measured against plain decoding in the same rounds, so the machine's speed cancels. It shows a slower method.
- *Speed* is tokens per unit of a fixed piece of work, done in the same rounds. A slower machine cancels as far as that work
  resembles decoding. It also shows what slows plain decoding.

A change is reported when its 95 % interval excludes 1 and it is larger than a threshold. Only prompts that both runs have are
compared. The decision rests on the lines over all suites, so that many small comparisons do not raise a false alarm. The other
lines are shown. Either side may be several runs. Each run is then compared with its partner, which is best made right after it,
and the pairs are pooled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.settings import BASELINE
from outrider.bench.stats import FEWEST_PAIRS, Estimate, Times, pooled, quotient_of
from outrider.bench.summary import ALL, Line
from outrider.core.errors import OptionError


@dataclass(frozen=True)
class Change:
    """One line of two runs. Ratios are new over old; above 1 is better."""

    label: str
    suite: str
    batch_size: int
    speed: Estimate
    speedup: Estimate
    tokens_per_pass: float | None
    """None if the runs had different numbers of prompts."""
    counts: bool
    """Whether it takes part in the decision."""

    def regressed(self, threshold: float) -> bool:
        return any(_below(ratio, threshold) for ratio in (self.speed, self.speedup))

    def improved(self, threshold: float) -> bool:
        return not self.regressed(threshold) and any(
            ratio.low > 1 and ratio.value > 1 + threshold for ratio in (self.speed, self.speedup)
        )


def _below(ratio: Estimate, threshold: float) -> bool:
    return ratio.high < 1 and ratio.value < 1 - threshold


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The lines that both files have."""
    for document in (old, new):
        if document.get("kind") != "outrider bench":
            raise OptionError("this is not a file written by `outrider bench --json`; give two of those")
    if _what(old) != _what(new):
        raise OptionError(f"the two files measured different things: {_what(old)} and {_what(new)}; measure the same")
    before, after = _Run(old), _Run(new)
    keys = [key for key in after.lines if key in before.lines and key[1] != ALL]
    if not keys:
        raise OptionError("the two files have no setting, suite and batch size in common; measure the same ones")
    suites = list(dict.fromkeys(key[1] for key in keys))
    over_all = [] if len(suites) < 2 else list(dict.fromkeys((label, ALL, size) for label, _, size in keys))
    return [_change(before, after, key, suites if key[1] == ALL else [key[1]]) for key in [*over_all, *keys]]


def compare_runs(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Compare one file on either side, or equally many on both, pair by pair (see ``compare``)."""
    if len(old) != len(new) or 1 < len(old) < FEWEST_PAIRS:
        raise OptionError(
            f"{len(old)} old and {len(new)} new runs cannot be paired; give one of each, or as many old as new, at least "
            f"{FEWEST_PAIRS}"
        )
    pairs = [{_key(change): change for change in compare(a, b)} for a, b in zip(old, new, strict=True)]
    return [_pooled([pair[key] for pair in pairs]) for key in pairs[0] if all(key in pair for pair in pairs)]


def _pooled(changes: Sequence[Change]) -> Change:
    speed, speedup = (pooled([vars(change)[name] for change in changes]) for name in ("speed", "speedup"))
    gains = [change.tokens_per_pass for change in changes if change.tokens_per_pass is not None]
    gain = sum(gains) / len(gains) if len(gains) == len(changes) else None
    return replace(changes[0], speed=speed, speedup=speedup, tokens_per_pass=gain)


Key = tuple[str, str, int]


def _key(change: Change) -> Key:
    return change.label, change.suite, change.batch_size


def _what(document: Mapping[str, Any]) -> dict[str, Any]:
    run = document.get("run", {})
    shown = {name: run[name] for name in ("max_tokens", "temperature", "ignore_eos") if name in run}
    return {**shown, **{name: document["model"][name] for name in ("digest", "dtype") if "model" in document}}


def _change(before: _Run, after: _Run, key: Key, suites: Sequence[str]) -> Change:
    label, _, size = key
    found = [suite for suite in suites if all((label, suite, size) in run.lines for run in (before, after))]
    counts = {suite: min(run.num_chunks(suite, size) for run in (before, after)) for suite in found}
    times = [run.times(label, counts, size) for run in (after, before)]
    rulers = [run.ruler(counts, size) for run in (after, before)]
    plain = [run.times(BASELINE, counts, size) for run in (after, before)]
    whole = [run.lines.get(key) for run in (after, before)]
    same = all(run.num_chunks(suite, size) == count for run in (before, after) for suite, count in counts.items())
    gain = whole[0].tokens_per_pass / whole[1].tokens_per_pass if same and whole[0] and whole[1] else None
    speed, speedup = (
        quotient_of((times[0], rulers[0]), (times[1], rulers[1])),
        quotient_of((times[0], plain[0]), (times[1], plain[1])),
    )
    return Change(*key, speed, speedup, gain, counts=len(suites) > 1 or len(before.suites) == 1)


class _Run:
    """A bench file as tables of times."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        found = [Line.from_json(line) for line in document["lines"]]
        self.lines = {(line.label, line.suite, line.batch_size): line for line in found}
        self.suites = {line.suite for line in found} - {ALL}
        self._rulers = {(ruler["suite"], ruler["batch_size"]): ruler["times"] for ruler in document["ruler"]}

    def num_chunks(self, suite: str, size: int) -> int:
        return len(self._rulers[suite, size][0])

    def times(self, label: str, counts: Mapping[str, int], size: int) -> Times:
        """Times of the first chunks of each suite, side by side."""
        return _joined([(self.lines[label, suite, size].times, count) for suite, count in counts.items()])

    def ruler(self, counts: Mapping[str, int], size: int) -> Times:
        """Seconds of the fixed work beside these times."""
        return _joined([(self._rulers[suite, size], count) for suite, count in counts.items()])


def _joined(tables: Sequence[tuple[Times, int]]) -> Times:
    rounds = min(len(table) for table, _ in tables)
    return [[seconds for table, count in tables for seconds in list(table[i])[:count]] for i in range(rounds)]


def changes_table(changes: Sequence[Change], threshold: float) -> str:
    """Text for a terminal: the lines that decide, then those that changed."""
    width = max(len(_name(change)) for change in changes) + 2
    head = f"{'':<{width}}{'speed':>8}{'95 %':>16}{'speed-up':>10}{'95 %':>16}{'tok/pass':>10}"
    rows = [head]
    for change in changes:
        moved = change.regressed(threshold) or change.improved(threshold)
        if not change.counts and not moved:
            continue
        mark = "  SLOWER" if change.regressed(threshold) else "  faster" if moved else ""
        rows.append(
            f"{_name(change):<{width}}{_percent(change.speed.value):>8}{_range(change.speed):>16}{_percent(change.speedup.value):>10}"
            f"{_range(change.speedup):>16}{_percent(change.tokens_per_pass):>10}{mark if change.counts else mark.lower()}"
        )
    return "\n".join(rows)


def _name(change: Change) -> str:
    return f"{change.label}, {change.suite}" + (f", batch {change.batch_size}" if change.batch_size > 1 else "")


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f}%"


def _range(ratio: Estimate) -> str:
    return f"{100 * (ratio.low - 1):+.1f} .. {100 * (ratio.high - 1):+.1f}"
