"""A lane: the running requests of one method. The host drives its rounds (``host_lane.py``), or they are captured graphs
(``device_lane.py``). The scheduler does not ask which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from outrider.core.reading_target import PromptPiece
from outrider.core.report import RoundReport
from outrider.core.request import Request, RequestState
from outrider.engine.memory import BatchSize
from outrider.engine.prefill import Prefilled

Keep = Callable[[int, Any, int], object]
"""Called with a request whose prompt was read or that has ended, and with the cache row of its tokens, so that other requests
can reuse a shared prefix."""

Rank = Callable[[int], tuple[int, int]]
"""Importance of a request by its number: less is more important, and earlier."""


class Lane(ABC):
    """Requests that share rounds."""

    keep: Keep
    rank: Rank

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Target layers whose states of the prompts ``join`` needs."""

    @property
    @abstractmethod
    def rows(self) -> list[tuple[int, RequestState]]:
        """Numbers and states of the requests."""

    @property
    def order(self) -> list[int]:
        """Numbers of the requests."""
        return [number for number, _ in self.rows]

    @property
    def size(self) -> BatchSize:
        lengths = [len(state.tokens) for _, state in self.rows]
        return BatchSize(len(lengths), max(lengths, default=0), sum(lengths))

    def accepts(self, request: Request) -> bool:
        """Whether this lane can do all that the request asks for."""
        del request
        return True

    def has_room(self, sizes: Sequence[BatchSize]) -> bool:
        """Whether the lane's own memory has room for requests of these sizes."""
        del sizes
        return True

    @property
    def one_too_many(self) -> int | None:
        """A request that must wait again, because the others need its memory in the next round."""
        return None

    def reads(self, number: int, state: RequestState, prefix: Any, *, is_alone: bool) -> bool:
        """Take a request whose prompt the lane reads in its own rounds, starting after ``prefix``. Returns False if the prompt
        must be read first. ``is_alone``: no other request runs, and none can join it now."""
        del number, state, prefix, is_alone
        return False

    @abstractmethod
    def join(self, read: Prefilled) -> None:
        """Add requests. A request that cannot be joined raises."""

    @abstractmethod
    def leave(self, number: int) -> None:
        """Drop a request, if it is here."""

    @abstractmethod
    def step(self, room: int, pieces: Sequence[PromptPiece] = ()) -> RoundReport | None:
        """Run the next round with at most ``room`` guesses per row. Returns the report of the latest round that has ended.
        Requests that have ended leave. The lane that the scheduler gives ``pieces`` reads them in the same pass."""
