"""Turns measured cells into the figures of a report: one line per setting, suite and batch size, and one over all suites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.bandwidth import Bandwidth
from outrider.bench.results import Cell, Results
from outrider.bench.settings import BASELINE, Skipped
from outrider.bench.stats import Estimate, ratio_of, speed_of

ALL = "all suites"
_DEPTHS = 16
"""Most depths for which acceptance is kept."""


@dataclass(frozen=True)
class Line:
    """The figures of one setting on one suite."""

    label: str
    suite: str
    batch_size: int
    speed: Estimate
    """Tokens per second, prefill excluded."""
    speedup: Estimate
    """Speed over that of plain decoding in the same rounds."""
    tokens_per_pass: float
    """Emitted tokens per target pass, per row."""
    acceptance: float
    by_depth: tuple[float, ...]
    waste: float
    """Share of verified guesses that were rejected."""
    split: Mapping[str, float]
    """Shares of decoding time: draft, verify, walk, host."""
    pass_seconds: float
    bandwidth_fraction: float
    memory: int
    """Bytes the method holds beside the target."""
    identical: float
    """Share of prompts whose text equalled that of plain decoding."""
    times: tuple[tuple[float, ...], ...]
    """Seconds by round and chunk of prompts."""
    lossless: bool = True

    def to_json(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if name not in ("speed", "speedup")}
        return {**data, "speed": self.speed.to_json(), "speedup": self.speedup.to_json()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Line:
        fields = {**data, "speed": Estimate.from_json(data["speed"]), "speedup": Estimate.from_json(data["speedup"])}
        times = tuple(tuple(row) for row in data["times"])
        return Line(**{**fields, "by_depth": tuple(data["by_depth"]), "times": times})


def lines_of(results: Results, bandwidth: Bandwidth) -> list[Line]:
    """Lines over all suites, then suite by suite, with settings in the given order."""
    sizes = sorted({cell.batch_size for cell in results.cells.values()})
    suites = list(dict.fromkeys(cell.suite for cell in results.cells.values()))
    labels = list(dict.fromkeys(cell.setting.label for cell in results.cells.values()))
    groups = ([(ALL, suites)] if len(suites) > 1 else []) + [(name, [name]) for name in suites]
    found: list[Line] = []
    for size in sizes:
        for title, members in groups:
            base = [results.cell(BASELINE, name, size) for name in members]
            for label in labels:
                cells = [results.cell(label, name, size) for name in members]
                found.append(_line(title, cells, base=base, bandwidth=bandwidth))
    return found


def _line(title: str, cells: Sequence[Cell], *, base: Sequence[Cell], bandwidth: Bandwidth) -> Line:
    times, plain = _times(cells), _times(base)
    tallies = [cell.tally for cell in cells]
    seconds = sum(map(sum, times))
    parts = {
        "draft": sum(tally.draft_seconds for tally in tallies) / seconds,
        "verify": sum(tally.verify_seconds for tally in tallies) / seconds,
        "walk": sum(tally.walk_seconds for tally in tallies) / seconds,
    }
    passes = sum(tally.num_passes for tally in tallies)
    pass_seconds = sum(tally.verify_seconds for tally in tallies) / passes
    tested = [_at(tallies, "tested", k) for k in range(_DEPTHS)]
    accepted = [_at(tallies, "accepted", k) for k in range(_DEPTHS)]
    guesses = sum(tally.num_guesses for tally in tallies)
    return Line(
        label=cells[0].setting.label,
        suite=title,
        batch_size=cells[0].batch_size,
        speed=speed_of(sum(cell.tokens[0] for cell in cells), times),
        speedup=ratio_of(times, plain),
        tokens_per_pass=sum(sum(cell.tokens) for cell in cells) / sum(tally.num_rounds for tally in tallies),
        acceptance=sum(sum(t.accepted) for t in tallies) / max(1, sum(sum(t.tested) for t in tallies)),
        by_depth=tuple(hits / tests for hits, tests in zip(accepted, tested, strict=True) if tests),
        waste=1 - sum(tally.num_accepted for tally in tallies) / guesses if guesses else 0.0,
        split={**parts, "host": max(0.0, 1 - sum(parts.values()))},
        pass_seconds=pass_seconds,
        bandwidth_fraction=bandwidth.fraction(pass_seconds),
        memory=max(cell.memory for cell in cells),
        identical=sum(cell.num_identical for cell in cells) / max(1, sum(cell.num_prompts for cell in cells)),
        times=times,
        lossless=cells[0].setting.lossless,
    )


def _times(cells: Sequence[Cell]) -> tuple[tuple[float, ...], ...]:
    """Times by round and chunk, with the chunks of several suites side by side."""
    rounds = range(len(cells[0].times))
    return tuple(tuple(seconds for cell in cells for seconds in cell.times[i]) for i in rounds)


def _at(tallies: Iterable[Any], name: str, depth: int) -> int:
    return sum(vars(tally)[name][depth] for tally in tallies if depth < len(vars(tally)[name]))


def document(lines: Sequence[Line], results: Results, skipped: Sequence[Skipped], about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a bench."""
    return {
        "kind": "outrider bench",
        **about,
        "rounds": results.num_rounds,
        "ruler": _rulers(results),
        "lines": [line.to_json() for line in lines],
        "skipped": [{"label": skip.label, "reason": skip.reason} for skip in skipped],
    }


def _rulers(results: Results) -> list[dict[str, Any]]:
    """Seconds of the fixed work for every group of lines, in the same order of chunks."""
    sizes = sorted({size for _, size in results.ruler})
    found: list[dict[str, Any]] = []
    for size in sizes:
        tables = {suite: table for (suite, each), table in results.ruler.items() if each == size}
        joined = [[seconds for table in tables.values() for seconds in table[i]] for i in range(results.num_rounds)]
        found += [{"suite": suite, "batch_size": size, "times": table} for suite, table in tables.items()]
        found.append({"suite": ALL, "batch_size": size, "times": joined})
    return found
