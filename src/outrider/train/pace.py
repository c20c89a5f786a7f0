"""A budget of time for work beside serving: a small share while requests are served, everything while none are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final


@dataclass
class Work:
    """One piece of work."""

    seconds: float = 0.0
    """How long it took; known when it is over."""


@final
class Pace:
    """Pauses after each piece of work, for as long as the budget asks.

    A piece of s seconds is followed by a pause of s (1 / share - 1), which ends at once when nothing is served any more."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._is_free = threading.Event()
        self._is_free.set()
        self._has_ended = False

    def tell(self, *, is_idle: bool) -> None:
        """From the thread that serves: whether anything is being served now."""
        if is_idle or self._has_ended:
            self._is_free.set()
        else:
            self._is_free.clear()

    def end(self) -> None:
        """No more pauses: the server stops."""
        self._has_ended = True
        self._is_free.set()

    @contextmanager
    def working(self) -> Iterator[Work]:
        """Do a piece of work, then pause."""
        work, began = Work(), time.perf_counter()
        yield work
        work.seconds = time.perf_counter() - began
        self._is_free.wait(work.seconds * (1 / self._share - 1))
