"""Sums over the rounds of a run.

Plain decoding and every method are counted by the same code, from the reports of their rounds. It counts the split of the time
(draft, verify, walk, host), acceptance by depth, and rejected guesses.

    round = draft + verify + walk (law, rule, commit) + host (observe, emit, statistics)
    acceptance at depth k = rounds that accepted k guesses or more / rounds in which depth k was put to the test
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from outrider.core.interfaces import Observation


@dataclass
class Tally:
    """Sums over rounds."""

    num_rounds: int = 0
    """Rounds of rows: a round of a batch of four counts as four."""
    num_passes: int = 0
    """Target passes: a round of a batch of four counts as one."""
    num_nodes: int = 0
    """Nodes verified, roots included."""
    num_guesses: int = 0
    num_accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    walk_seconds: float = 0.0
    tested: list[int] = field(default_factory=list)
    """By depth from 0: rounds in which a guess of that depth was tested."""
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    """By depth: rounds whose longest path of guesses reached it."""
    by_size: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of verification by number of nodes in the pass (rows times padded nodes)."""

    @property
    def acceptance(self) -> float:
        """Accepted over tested."""
        return sum(self.accepted) / sum(self.tested) if sum(self.tested) else 0.0

    @property
    def waste(self) -> float:
        """Share of verified guesses that were not accepted."""
        return 1 - self.num_accepted / self.num_guesses if self.num_guesses else 0.0

    @property
    def by_depth(self) -> list[float]:
        return [hits / tests for hits, tests in zip(self.accepted, self.tested, strict=True) if tests]

    def __add__(self, other: Tally) -> Tally:
        """The sums of both."""
        mine, theirs = vars(self), vars(other)
        sums: dict[str, Any] = {name: value + theirs[name] for name, value in mine.items() if isinstance(value, int | float)}
        lists: dict[str, Any] = {name: _sum(mine[name], theirs[name]) for name in ("tested", "accepted", "drafted")}
        sizes = self.by_size.keys() | other.by_size.keys()
        by_size = {size: [*self.by_size.get(size, []), *other.by_size.get(size, [])] for size in sizes}
        return Tally(**sums, **lists, by_size=by_size)

    def add(self, seen: Observation) -> None:
        tree = seen.draft.tree
        self.num_passes += 1
        self.draft_seconds += seen.draft_seconds
        self.verify_seconds += seen.score_seconds
        self.walk_seconds += seen.seconds - seen.draft_seconds - seen.score_seconds
        self.by_size.setdefault(tree.num_nodes * tree.batch_size, []).append(seen.score_seconds)
        for row, (path, size) in enumerate(zip(seen.paths, tree.sizes, strict=True)):
            self.num_rounds += 1
            self.num_nodes += size
            self.num_guesses += size - 1
            self.num_accepted += len(path) - 1
            self._count(len(path) - 1, tested_further=_has_children(seen, row))
        for depth in seen.draft.tree.heights:
            self.drafted += [0] * (depth - len(self.drafted))
            for k in range(depth):
                self.drafted[k] += 1

    def _count(self, num_accepted: int, *, tested_further: bool) -> None:
        depth = num_accepted + tested_further
        missing = max(0, depth - len(self.tested))
        self.tested += [0] * missing
        self.accepted += [0] * missing
        for k in range(depth):
            self.tested[k] += 1
            self.accepted[k] += k < num_accepted


def _sum(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]


def _has_children(seen: Observation, row: int) -> bool:
    """Whether there were guesses at the end of the path."""
    tree, end = seen.draft.tree, seen.paths[row][-1]
    if tree.is_chain:
        return end < tree.sizes[row] - 1
    return bool((tree.parents[row, : tree.sizes[row]] == end).any())
