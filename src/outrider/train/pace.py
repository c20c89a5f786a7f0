"""A budget of time for work beside serving: a small share while requests are served, and pauses that last."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

_FIRST_S = 1.0


@final
class Pace:
    """Lets a piece of work begin when its time has been saved up, or when nothing was served for as long as it will take.

        saved = share * (seconds of serving) - (seconds of work while serving)    begin when saved >= seconds of the last piece

    A pause is not taken for one at once: requests that come in waves leave moments between them, and a piece that began in one
    would run beside the next wave. The first piece is taken to need a second. What a piece takes beyond its price is paid for
    before the next one. Idle time neither pays nor forgives."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._changed = threading.Condition()
        self._is_idle, self._has_ended, self._told = True, False, time.perf_counter()
        self._busy = self._spent = self._paused = 0.0
        self._cost = _FIRST_S
        self.seconds = 0.0
        """Time of all pieces."""

    def tell(self, *, is_idle: bool) -> None:
        """Told by the serving thread between rounds: whether anything is being served now."""
        with self._changed:
            self._count()
            self._is_idle = is_idle
            self._paused = self._paused if is_idle else 0.0
            if self._may_work():
                self._changed.notify_all()

    def end(self) -> None:
        """Release whatever waits for the budget, because the server stops."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wait for the budget, then do a piece of work."""
        with self._changed:
            self._changed.wait_for(self._may_work)
            self._count()
            busy, began = self._busy, time.perf_counter()
        yield
        with self._changed:
            self._count()
            self._cost = time.perf_counter() - began
            self.seconds += self._cost
            self._spent += self._busy - busy

    @property
    def saved(self) -> float:
        """Seconds of work that serving has paid for; below 0 where work is owed."""
        return self._share * self._busy - self._spent

    def _may_work(self) -> bool:
        return self._paused >= self._cost or self._has_ended or self._share >= 1 or self.saved >= self._cost

    def _count(self) -> None:
        """Add the time since the last look to what was served, or to the pause."""
        passed, self._told = time.perf_counter() - self._told, time.perf_counter()
        if self._is_idle:
            self._paused += passed
        else:
            self._busy, self._paused = self._busy + passed, 0.0
