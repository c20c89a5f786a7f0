"""Measurements of a run: a cell per setting, suite and batch size. They stay complete when a run ends early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.bench.settings import Setting
from outrider.bench.tally import Tally


@dataclass
class Cell:
    """One setting on one suite at one batch size: a figure per round, and counts over all of them."""

    setting: Setting
    suite: str
    batch_size: int
    tokens: list[int] = field(default_factory=list)
    """Emitted tokens of every round."""
    times: list[list[float]] = field(default_factory=list)
    """Seconds of decoding by round and chunk, prefill excluded."""
    prefill_seconds: float = 0.0
    tallies: list[Tally] = field(default_factory=list)
    """Counts of every round."""
    memory: int = 0
    num_prompts: int = 0
    num_identical: int = 0
    """Number of prompts whose text equalled that of plain decoding."""

    @property
    def tally(self) -> Tally:
        """Counts of all rounds."""
        return sum(self.tallies, Tally())

    def cut(self, num_rounds: int) -> None:
        """Drop later rounds."""
        for figures in (self.tokens, self.times, self.tallies):
            del figures[num_rounds:]


@dataclass
class Results:
    """Everything measured."""

    cells: dict[tuple[str, str, int], Cell]
    ruler: dict[tuple[str, int], list[list[float]]]
    """Seconds of a fixed piece of work, by suite and batch size, round and chunk. It tells a slower machine from slower
    code."""
    num_rounds: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    def new_round(self, cells: Iterable[Cell], suite: str, batch_size: int) -> list[float]:
        """Add places for the figures of one more round; returns those of the fixed work."""
        for cell in cells:
            cell.tokens.append(0)
            cell.times.append([])
            cell.tallies.append(Tally())
        rulers = self.ruler.setdefault((suite, batch_size), [])
        rulers.append([])
        return rulers[-1]

    def keep_whole(self, prompts: Mapping[str, list[list[int]]], sizes: Sequence[int]) -> dict[str, list[list[int]]]:
        """Drop what a run that ended early measured only in part. Returns the prompts that were measured, by suite.

        A later round that is not complete is dropped. Of a first round, suites and batch sizes that nobody reached are dropped.
        """
        chunks = {key: [len(times) for times in rounds] for key, rounds in self.ruler.items()}
        reached = [(name, size) for size in sizes for name in prompts if chunks.get((name, size), [0])[0]]
        first = [name for name in prompts if (name, sizes[0]) in reached]
        whole = [size for size in sizes if all((name, size) in reached for name in first)]
        kept = [(name, size) for size in whole for name in first]
        # A round is complete where it has as many chunks as the first one; the first one counts as it is.
        self.num_rounds = min(sum(count == rounds[0] for count in rounds) for rounds in (chunks[key] for key in kept))
        self.cells = {key: cell for key, cell in self.cells.items() if key[1:] in kept}
        self.ruler = {key: rounds[: self.num_rounds] for key, rounds in self.ruler.items() if key in kept}
        for cell in self.cells.values():
            cell.cut(self.num_rounds)
        return {name: prompts[name][: max(size * chunks[name, size][0] for size in whole)] for name in first}

    def cell(self, label: str, suite: str, batch_size: int) -> Cell:
        return self.cells[label, suite, batch_size]
