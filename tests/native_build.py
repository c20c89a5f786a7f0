"""The native pass is built once for all workers of a machine, while they import and collect tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BUILD = "from outrider.models.native import BUILD; BUILD.wait()"
_SOURCES = Path(__file__).parents[1] / "src"


@contextmanager
def _alone() -> Iterator[None]:
    """One process of a user at a time. The system opens the lock when a process ends."""
    with Path(tempfile.gettempdir(), f"outrider-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin_build() -> None:
    """Begin in the process that starts the workers. It has the lock before there are any, and a process of its own builds."""
    has_begun = threading.Event()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_SOURCES), os.environ.get("PYTHONPATH", "")])}

    def build() -> None:
        with _alone():
            has_begun.set()
            subprocess.run([sys.executable, "-c", _BUILD], env=environment, check=False)

    threading.Thread(target=build, daemon=True).start()
    has_begun.wait()


def wait_for_build() -> None:
    """Wait until it is built, or build it where nobody has begun."""
    from outrider.models.native import BUILD

    with _alone():
        BUILD.wait()
