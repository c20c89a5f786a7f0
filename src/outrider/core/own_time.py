"""Seconds of a thread, without those it waited for a processor that other work had.

On a busy machine most of a round's wall time may be such waiting. It says nothing of the round, and what it hits is chance. So
times that are compared with each other leave it out. Linux counts it for every thread (``/proc/thread-self/schedstat``: time on
a processor, time in a queue for one, turns). Elsewhere nothing is left out. The count is rough beside short spans of time, so a
span is never shorter than what the thread had of a processor, and never longer than the wall's.
"""

from __future__ import annotations

import os
import threading
import time
from typing import final

_COUNTS = "/proc/thread-self/schedstat"


@final
class _Clock(threading.local):
    """The clock of one thread, which keeps its counts open. A forked child has counts of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        try:
            self._file = os.open(_COUNTS, os.O_RDONLY)
        except OSError:
            self._file = -1
        self._seen = self._counts()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _counts(self) -> tuple[float, float, float]:
        """Seconds on the wall, on a processor, and in a queue for one."""
        wall, busy = time.perf_counter(), time.thread_time()
        if self._file < 0:
            return wall, busy, 0.0
        _, waited, *_ = os.pread(self._file, 64, 0).split()
        return wall, busy, int(waited) / 1e9

    def read(self) -> float:
        if self._process != os.getpid():
            self._open()
        before, self._seen = self._seen, self._counts()
        wall, busy, waited = (after - was for after, was in zip(self._seen, before, strict=True))
        self.now += min(max(wall - waited, busy, 0.0), wall)
        return self.now


_CLOCK = _Clock()


def own_seconds() -> float:
    """A clock of the calling thread. It begins at zero for each."""
    return _CLOCK.read()
