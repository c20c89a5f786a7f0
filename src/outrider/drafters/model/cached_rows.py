"""State of drafters that run a draft model: its cache, and the number of committed tokens in it before this round's guesses."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from outrider.core.interfaces import Cache, RowState


@dataclass
class CachedRows(RowState, ABC):
    """A cache that forks and joins with its rows. All other fields are scratch of one round and do not follow the rows."""

    cache: Cache
    base: list[int] = field(default_factory=list)
    """Committed tokens of each row when this round's drafting began; empty between rounds."""

    def fork(self, rows: Sequence[int]) -> Self:
        return type(self)(self.cache.fork(rows))

    def narrow(self, rows: Sequence[int]) -> Self:
        return type(self)(self.cache.narrow(rows))

    def join(self, other: Self) -> Self:
        return type(self)(self.cache.join(other.cache))
