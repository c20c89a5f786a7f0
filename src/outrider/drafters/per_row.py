"""State of drafters that remember something of each request: one memory per row, which forks and joins with the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

from outrider.core.interfaces import Context, RowState


class RowMemory(Protocol):
    """The memory of one request."""

    def copy(self: Memory) -> Memory: ...


Memory = TypeVar("Memory", bound=RowMemory)


def forked(memories: Sequence[Memory], rows: Sequence[int]) -> list[Memory]:
    """The memories of ``rows``. The first use of a row keeps its memory; every further use gets a copy."""
    taken: set[int] = set()
    found: list[Memory] = []
    for row in rows:
        found.append(memories[row].copy() if row in taken else memories[row])
        taken.add(row)
    return found


@final
@dataclass
class PerRow(RowState, Generic[Memory]):
    """One memory per row and nothing else."""

    rows: list[Memory]

    def fork(self, rows: Sequence[int]) -> PerRow[Memory]:
        return PerRow(forked(self.rows, rows))

    def join(self, other: PerRow[Memory]) -> PerRow[Memory]:
        return PerRow([*self.rows, *other.rows])


@final
@dataclass
class PerRowInContext(RowState, Generic[Memory]):
    """One memory per row, and the context of the round being scored."""

    rows: list[Memory]
    context: Context | None = None
    """The context whose sampler and noise make the target's laws and choices; None between rounds."""

    def fork(self, rows: Sequence[int]) -> PerRowInContext[Memory]:
        return PerRowInContext(forked(self.rows, rows))

    def join(self, other: PerRowInContext[Memory]) -> PerRowInContext[Memory]:
        return PerRowInContext([*self.rows, *other.rows])
