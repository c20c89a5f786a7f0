"""A budget of time for work beside serving: a small share while requests are served, everything while none are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

_FIRST_S = 1.0


@dataclass
class Work:
    """One piece of work."""

    seconds: float = 0.0
    """How long it took; known when it is over."""


@final
class Pace:
    """Lets a piece of work begin when nothing is served, or when its time has been saved up.

        saved = share * (seconds of serving) - (seconds of work while serving)    begin when saved >= seconds of the last piece

    The first piece is taken to need a second. What a piece takes beyond its price is paid for before the next one. Idle time
    neither pays nor forgives."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._changed = threading.Condition()
        self._is_idle, self._has_ended, self._told = True, False, time.perf_counter()
        self._busy = self._spent = 0.0
        self._cost = _FIRST_S

    def tell(self, *, is_idle: bool) -> None:
        """Told by the serving thread between rounds: whether anything is being served now."""
        with self._changed:
            self._count()
            self._is_idle = is_idle
            if self._may_work():
                self._changed.notify_all()

    def end(self) -> None:
        """Release whatever waits for the budget, because the server stops."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @contextmanager
    def working(self) -> Iterator[Work]:
        """Wait for the budget, then do a piece of work."""
        with self._changed:
            self._changed.wait_for(self._may_work)
            self._count()
            busy, began, work = self._busy, time.perf_counter(), Work()
        yield work
        with self._changed:
            self._count()
            work.seconds = self._cost = time.perf_counter() - began
            self._spent += self._busy - busy

    @property
    def saved(self) -> float:
        """Seconds of work that serving has paid for; below 0 where work is owed."""
        return self._share * self._busy - self._spent

    def _may_work(self) -> bool:
        return self._is_idle or self._has_ended or self._share >= 1 or self.saved >= self._cost

    def _count(self) -> None:
        """Add the time since the last look to what was served."""
        now = time.perf_counter()
        self._busy += 0.0 if self._is_idle else now - self._told
        self._told = now
