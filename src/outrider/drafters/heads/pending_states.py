"""The target's states of committed tokens that a drafter has yet to read.

Every round adds some, but only rounds that draft read them. So a round is only recorded, which takes a microsecond, and the
states are arranged row by row when they are needed. A paused drafter therefore costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor


@final
class PendingStates:
    """Unread states [m, F] of each row, the oldest first."""

    def __init__(self, rows: Sequence[Tensor], taps: Sequence[int], num_kept: int | None = None) -> None:
        """``taps`` are in the order of features. Only each row's newest ``num_kept`` states matter; None keeps all."""
        self._rows, self._taps = list(rows), taps
        self._num_kept = num_kept
        self._noted: list[tuple[Mapping[int, Tensor], Sequence[Sequence[int]]]] = []

    def note(self, states: Mapping[int, Tensor], paths: Sequence[Sequence[int]]) -> None:
        """Add a round: states [B, N, H] by tap, and the committed nodes of every row."""
        self._noted.append((states, paths))
        if self._num_kept is not None and len(self._noted) > self._num_kept:  # every round commits a token of every row
            del self._noted[0]

    @property
    def rows(self) -> list[Tensor]:
        if self._noted:
            noted = [([states[tap] for tap in self._taps], paths) for states, paths in self._noted]
            added = [[_of_row(states, row, paths[row]) for states, paths in noted] for row in range(len(self._rows))]
            self._rows = [_joined(old, new, self._num_kept) for old, new in zip(self._rows, added, strict=True)]
            self._noted = []
        return self._rows

    def add(self, rows: Sequence[Tensor]) -> None:
        """Add states of every row."""
        self._rows = [_joined(old, [new], self._num_kept) for old, new in zip(self.rows, rows, strict=True)]

    def drop(self, counts: Sequence[int]) -> None:
        """Drop each row's oldest ``counts[b]`` states, which were read."""
        self._rows = [old[count:] for old, count in zip(self.rows, counts, strict=True)]

    def fork(self, rows: Sequence[int]) -> PendingStates:
        mine = self.rows
        return PendingStates([mine[row] for row in rows], self._taps, self._num_kept)

    def join(self, other: PendingStates) -> PendingStates:
        return PendingStates([*self.rows, *other.rows], self._taps, self._num_kept)


def _of_row(states: Sequence[Tensor], row: int, path: Sequence[int]) -> Tensor:
    """[m, F] features of one row's committed nodes."""
    index = list(path)
    return torch.cat([each[row, index] for each in states], -1)


def _joined(old: Tensor, new: Sequence[Tensor], num_kept: int | None) -> Tensor:
    joined = torch.cat([old, *(each.to(old.dtype) for each in new)])
    return joined if num_kept is None else joined[-num_kept:]
