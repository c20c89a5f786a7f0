"""Which rows of a batch share the next round, and how they are laid side by side.

Rows of a batch accept different numbers of guesses, so their lengths diverge. Caches here take rows of any lengths (*ragged*):
every row takes part in every round and nothing is moved. The other two modes are those of engines whose batches are rectangles.
They exist to be measured against ("Batch Speculative Decoding Done Right", arXiv 2510.22876).

    eqspec:  before every round all rows are copied into a new rectangle, padded to the longest          (unpad, append, repad)
    exspec:  a round takes rows of equal length from the window, which need no padding; where no two are equal, or somebody has
             waited for long, those who waited longest, realigned as above                                (window = 3 groups)

None of them changes a text, because rows of a pass do not see each other. Both copy what they move, as their authors do.
Rectangles here are padded on the right, where our passes leave room for a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from outrider.core.catalog import Catalog
from outrider.engine.step import Batch

_WINDOW_GROUPS = 3
"""Number of groups among which exspec looks for rows of equal length."""
_PATIENCE = 8
"""Rounds that exspec lets a row wait for another of equal length. A batch that is never refilled needs no such limit."""


@final
@dataclass(frozen=True)
class Grouping:
    """Chooses the rows of a round and their layout."""

    choose: Callable[[Sequence[int], Sequence[int], int], list[int]]
    """Chooses the rows of the next round. Arguments: tokens of each row, rounds that each has waited, and the most rows."""
    is_padded: Callable[[set[int]], bool]
    """Whether rows of these lengths are copied into a new rectangle."""

    def laid_out(self, batch: Batch) -> Batch:
        """The rows in the layout of this grouping."""
        return batch.fork(range(len(batch.rows))) if self.is_padded(set(batch.cache.lengths)) else batch


def _everybody(lengths: Sequence[int], waited: Sequence[int], max_rows: int) -> list[int]:
    del waited, max_rows
    return list(range(len(lengths)))


def _equals(lengths: Sequence[int], waited: Sequence[int], max_rows: int) -> list[int]:
    """Rows of one length, if at least two have it."""
    size = max(1, max_rows // _WINDOW_GROUPS)
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(length, []).append(row)
    largest = max(by_length.values(), key=lambda rows: min(len(rows), size))
    if len(largest) == 1 or max(waited) >= _PATIENCE:
        largest = sorted(range(len(lengths)), key=lambda row: -waited[row])
    return largest[:size]


GROUPINGS: Catalog[Grouping] = Catalog(
    "grouping",
    {
        "ragged": Grouping(_everybody, lambda _: False),
        "eqspec": Grouping(_everybody, lambda _: True),
        "exspec": Grouping(_equals, lambda lengths: len(lengths) > 1),
    },
)
