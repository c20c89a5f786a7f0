"""A thread that works on a device while another thread does.

It may replay graphs but not capture them: during a capture nobody may wait for the device or use its default stream.
Work that lacks a graph ends with ``NotCapturedError``. The main thread then does that work itself and captures the graph.
"""

from __future__ import annotations

import functools
import threading

import torch


class NotCapturedError(RuntimeError):
    """A graph is missing, and this thread may not capture one."""


class _Mark(threading.local):
    is_set = False


_MARK = _Mark()


def become_side_thread() -> None:
    """Mark the calling thread as a side thread: the ``initializer`` of a pool."""
    _MARK.is_set = True


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of side threads on a GPU. It comes from PyTorch's pool of urgent streams, because captures use the other pool.
    A pool hands out its 32 streams again and again, so one of that pool could be the stream of a capture."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def check_may_capture() -> None:
    """Refuse to capture a graph on a side thread."""
    if _MARK.is_set:
        raise NotCapturedError("a thread beside the engine's cannot capture a graph")
