"""The native pass is built once for all workers of a machine, while they import and collect tests."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.models.native import BUILD
from outrider.models.native.compiler import cache_folder


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time. The system opens the lock when a process ends."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin_build() -> None:
    """Begin in the process that starts the workers. It has the lock before there are any."""
    has_begun = threading.Event()

    def build() -> None:
        with _alone():
            has_begun.set()
            BUILD.wait()

    threading.Thread(target=build, daemon=True).start()
    has_begun.wait()


def wait_for_build() -> None:
    """Wait until it is built, or build it where nobody has begun."""
    with _alone():
        BUILD.wait()
