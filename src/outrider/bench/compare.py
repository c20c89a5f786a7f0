"""Is this run slower than that one? Two bench files, line by line.

Two questions are asked of every setting. *Speed-up*: measured against plain decoding in the same rounds, so the machine
cancels; sees a slower method. *Speed*: tokens per unit of a fixed piece of work done in the same rounds, so that a slower
machine cancels as far as that work resembles decoding; sees what slows plain decoding too. A change is reported when its 95 %
interval excludes 1 and it is larger than a threshold. The decision is made on the lines over all suites, so that a
hundred small comparisons do not make a false alarm; the others are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.settings import BASELINE
from outrider.bench.stats import Estimate, Times, quotient_of
from outrider.bench.summary import Line
from outrider.core.errors import OptionError


@dataclass(frozen=True)
class Change:
    """One line of two runs; ratios are new over old, above 1 is better."""

    label: str
    suite: str
    batch_size: int
    speed: Estimate
    speedup: Estimate
    tokens_per_pass: float
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
    before, after = _Run(old), _Run(new)
    first = next(iter(before.lines.values()))
    changes: list[Change] = []
    for key in after.lines.keys() & before.lines.keys():
        speed = quotient_of(after.against_ruler(key), before.against_ruler(key))
        speedup = quotient_of(after.against_plain(key), before.against_plain(key))
        gain = after.lines[key].tokens_per_pass / before.lines[key].tokens_per_pass
        changes.append(Change(*key, speed, speedup, gain, counts=key[1] == first.suite))
    if not changes:
        raise OptionError("the two files have no setting, suite and batch size in common; measure the same ones")
    order = list(after.lines)
    return sorted(changes, key=lambda change: order.index((change.label, change.suite, change.batch_size)))


Key = tuple[str, str, int]


class _Run:
    """A bench file as pairs of (times, baseline)."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        found = [Line.from_json(line) for line in document["lines"]]
        self.lines = {(line.label, line.suite, line.batch_size): line for line in found}
        self._rulers = {(ruler["suite"], ruler["batch_size"]): ruler["times"] for ruler in document["ruler"]}

    def against_plain(self, key: Key) -> tuple[Times, Times]:
        return self.lines[key].times, self.lines[BASELINE, key[1], key[2]].times

    def against_ruler(self, key: Key) -> tuple[Times, Times]:
        """Tokens per unit of the fixed work instead of per second."""
        return self.lines[key].times, self._rulers[key[1], key[2]]


def changes_table(changes: Sequence[Change], threshold: float) -> str:
    """What a terminal shows: the lines that decide, then those that moved."""
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


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"


def _range(ratio: Estimate) -> str:
    return f"{100 * (ratio.low - 1):+.1f} .. {100 * (ratio.high - 1):+.1f}"
