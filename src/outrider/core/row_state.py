"""State that belongs to the rows of a batch, and follows them as requests leave, fork and arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class RowState(ABC):
    """State of B rows that can be narrowed, repeated and joined as requests leave, fork and arrive."""

    @abstractmethod
    def fork(self, rows: Sequence[int]) -> RowState: ...

    @abstractmethod
    def join(self, other: Any) -> RowState: ...

    def narrow(self, rows: Sequence[int]) -> RowState:
        """``fork`` this state, which is not used again (see ``Cache.narrow``)."""
        return self.fork(rows)


class Stateless(RowState):
    """State of a part that remembers nothing."""

    def fork(self, rows: Sequence[int]) -> Stateless:
        del rows
        return self

    def join(self, other: Any) -> Stateless:
        del other
        return self
