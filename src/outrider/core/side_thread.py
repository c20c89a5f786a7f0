"""A thread that works on a device while another thread does.

It may replay graphs, and not capture them: until a capture ends, nobody may wait for the device or use its default stream.
Work of such a thread that lacks a graph ends with ``NotCapturedError``. The thread in front then does that work itself, which
captures.
"""

from __future__ import annotations

import threading


class NotCapturedError(RuntimeError):
    """A graph is missing, and this thread may not capture one."""


class _Mark(threading.local):
    is_set = False


_MARK = _Mark()


def become_side_thread() -> None:
    """From now on the calling thread is one: the ``initializer`` of a pool."""
    _MARK.is_set = True


def check_may_capture() -> None:
    """Called before a graph is captured."""
    if _MARK.is_set:
        raise NotCapturedError("a thread beside the engine's cannot capture a graph")
