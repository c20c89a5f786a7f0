"""Time of a thread, without its waits for a processor that other work used.

On a busy machine most of a round's wall time may be such waiting, which says nothing about the round. So times that are
compared with each other leave it out. Linux counts it for every thread (``/proc/thread-self/schedstat``: time on a processor,
time in the queue for one, turns). Other systems do not, and there nothing is left out. The count is coarse, so a span is kept
between the thread's processor time and the wall time. Reading the count is slow, so it is read only where those two differ.
"""

from __future__ import annotations

import os
import threading
import time
from typing import final

_COUNTS = "/proc/thread-self/schedstat"
_ALIKE = 20e-6
"""Most seconds between wall time and processor time for which the count is not read."""


@final
class _Clock:
    """The clock of one thread. It keeps the system's file open, because a round reads it four times."""

    def __init__(self, now: float = 0.0) -> None:
        self.now, self.process = now, os.getpid()
        try:
            self._file = os.open(_COUNTS, os.O_RDONLY)
        except OSError:
            self._file = -1
        self._wall, self._busy, self._waited = time.perf_counter(), time.thread_time(), self._queued()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _queued(self) -> float:
        """Seconds spent waiting for a processor."""
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0

    def read(self) -> float:
        wall, busy = time.perf_counter(), time.thread_time()
        span, had = wall - self._wall, busy - self._busy
        self._wall, self._busy = wall, busy
        if span - had < _ALIKE:
            self.now += span
            return self.now
        waited = self._queued()
        lost, self._waited = waited - self._waited, waited
        self.now += min(max(span - lost, had, 0.0), span)
        return self.now


@final
class _Clocks(threading.local):
    """Holds the clock of each thread."""

    clock: _Clock | None = None


_CLOCKS = _Clocks()


def own_seconds() -> float:
    """Seconds on the calling thread's own clock, which starts at zero. A forked child has its own count."""
    clock = _CLOCKS.clock
    if clock is None or clock.process != os.getpid():
        clock = _CLOCKS.clock = _Clock(0.0 if clock is None else clock.now)
    return clock.read()
