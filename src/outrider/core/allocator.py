"""Memory of a process that runs for long: free pages go back to the system, and what was loaded is not searched for garbage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def give_back() -> None:
    """Make the C library return its free pages to the system. Only glibc keeps enough of them to matter."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Exclude everything loaded so far from Python's garbage collection. A full collection stops all threads. With
    PyTorch loaded it took 0.1 to 0.2 s, and a few large requests were enough to start one."""
    gc.collect()
    gc.freeze()
