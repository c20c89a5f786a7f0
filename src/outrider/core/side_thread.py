"""A thread that works on a device while another thread does.

It may replay graphs but not capture them: during a capture nobody may wait for the device or use its default stream.
Work that lacks a graph ends with ``NotCapturedError``. The main thread then does that work itself and captures the graph.
"""

from __future__ import annotations

import threading


class NotCapturedError(RuntimeError):
    """A graph is missing, and this thread may not capture one."""


class _Mark(threading.local):
    is_set = False


_MARK = _Mark()


def become_side_thread() -> None:
    """Mark the calling thread as a side thread: the ``initializer`` of a pool."""
    _MARK.is_set = True


def check_may_capture() -> None:
    """Refuse to capture a graph on a side thread."""
    if _MARK.is_set:
        raise NotCapturedError("a thread beside the engine's cannot capture a graph")
