"""A second process that holds a model, or a share of one, and does what this process tells it.

It runs a module of ours, reads messages from its standard input, and answers through its standard output. It ends when the pipe
closes, so it never outlives the process that started it. If it dies, its last output says why.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
from typing import IO, Any, final

READY = "ready"
"""A companion's answer once its model is loaded."""


def write_message(to: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    to.write(struct.pack("<q", len(data)) + data)
    to.flush()


def read_message(source: IO[bytes]) -> Any:
    """The next message; None if the other side has ended."""
    header = source.read(8)
    if len(header) < 8:
        return None
    size = struct.unpack("<q", header)[0]
    data = source.read(size)
    return pickle.loads(data) if len(data) == size else None


def answering() -> IO[bytes]:
    """The stream for answers; the companion calls this first. From then on, prints go to standard error, and Ctrl-C is
    left to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


@final
class Companion:
    """The companion process, as its parent sees it."""

    def __init__(self, title: str, module: str, first: Any, *, place: str, num_threads: int) -> None:
        """``first`` is its first message; ``place`` names its device in messages."""
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(num_threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=env,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout
        self.name = f"{title} (process {self.process.pid} on {place})"
        self.tell(first)

    def tell(self, message: Any) -> None:
        write_message(self._to, message)

    def answer(self) -> Any:
        """The companion's next answer; None if it has died."""
        return read_message(self._from)

    def is_ready(self) -> bool:
        """Wait until its model is loaded; False if it died before."""
        return self.answer() == READY

    def describe_end(self) -> str:
        """Describe how the companion ended, with its last output."""
        code = self.process.returncode
        how = "did not answer" if code is None else f"ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip().splitlines()
        return f"{self.name} {how}" + (f" ({said[-1]})" if said else "")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._to, self._from):
            try:
                pipe.close()
            except OSError:  # what was not read cannot be flushed
                continue


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
