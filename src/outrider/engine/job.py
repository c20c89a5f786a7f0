"""Input of a scheduler: requests, and how many of them may run at once."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from outrider.core.errors import OptionError
from outrider.core.request import RequestState


@dataclass(frozen=True)
class Slots:
    """Limits on what may happen at once."""

    max_rows: int = 32
    """Most requests that share rounds."""
    prefill_tokens: int = 512
    """Most prompt tokens read between two rounds."""
    grouping: str = "ragged"
    """How the rows of a round are chosen (``engine/grouping.py``)."""
    reading_rounds: float = math.inf
    """Longest time for prefill between two rounds, in rounds (``engine/pieces.py``)."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "prefill_tokens"):
            if vars(self)[name] < 1:
                raise OptionError(f"{name} = {vars(self)[name]} is not valid; use at least 1")
        if not self.reading_rounds > 0:
            raise OptionError(f"reading_rounds = {self.reading_rounds} is not valid; use a number above 0")


@dataclass(frozen=True, eq=False)
class Job:
    """A request in the scheduler."""

    id: int
    state: RequestState
    lane: Hashable = None
    """Name of the method it runs with."""
    priority: int = 0
    """Requests with a larger one wait behind those with a smaller one."""
    shares_prefix: bool = True
    """Whether it may reuse stored prefixes, and store its own."""
    traced: bool = False
    """Whether its rounds must report their trees, which captured rounds cannot."""
    created: float = field(default_factory=time.perf_counter)

    @property
    def rank(self) -> tuple[int, int]:
        """Place in the queue: the more important first, then the earlier."""
        return self.priority, self.id
