"""Seconds of a thread, without those it waited for a processor that other work had.

On a busy machine most of a round's wall time may be such waiting. It says nothing of the round, and what it hits is chance. So
times that are compared with each other leave it out. Linux counts it for every thread (``/proc/thread-self/schedstat``: time on
a processor, time in a queue for one, turns). Elsewhere nothing is left out.
"""

from __future__ import annotations

import os
import threading
import time
from typing import final

_COUNTS = "/proc/thread-self/schedstat"


@final
class _Queue(threading.local):
    """The counts of one thread, kept open. A forked child has counts of its own."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self.process = os.getpid()
        try:
            self.file = os.open(_COUNTS, os.O_RDONLY)
        except OSError:
            self.file = -1

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)

    def seconds(self) -> float:
        """Time that the thread has waited for a processor."""
        if self.process != os.getpid():
            self._open()
        if self.file < 0:
            return 0.0
        _, waited, *_ = os.pread(self.file, 64, 0).split()
        return int(waited) / 1e9


_QUEUE = _Queue()


def own_seconds() -> float:
    """A clock of the calling thread."""
    return time.perf_counter() - _QUEUE.seconds()
