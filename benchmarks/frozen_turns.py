"""Programs that take turns of a fraction of a second: one runs, and the others are stopped where they are.

A busy moment of the machine then meets all of them, so it does not change how they compare. The clock of a stopped program
stops too: ``time.perf_counter`` leaves out the time of the others. So a policy that times its rounds, and learning that waits
for a pause, see a program that runs alone. A program is a Python file of this folder that reads lines and answers each by one.

    python benchmarks/frozen_turns.py CLOCK FILE ARGUMENTS...       runs FILE under the clock; ``Frozen`` starts this
"""

from __future__ import annotations

import json
import mmap
import os
import runpy
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_STOPPED = struct.Struct("d")


class Frozen:
    """A program that stands still except in its turns."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """``arguments``: a Python file and its arguments. It runs until its first line is heard, and stands still then."""
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-clock-")
        clock = Path(self._folder.name) / "stopped"
        clock.write_bytes(_STOPPED.pack(0.0))
        with clock.open("r+b") as file:
            self._clock = mmap.mmap(file.fileno(), _STOPPED.size)
        self._stopped = self._since = 0.0
        command = [sys.executable, __file__, str(clock), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.heard()
        self.stop()

    def say(self, line: str) -> None:
        """Write a line, which is read in the next turn."""
        pipe = self._pipe(self._process.stdin)
        pipe.write(f"{line}\n")
        pipe.flush()

    def heard(self) -> Any:
        """The next line, which is JSON."""
        return json.loads(self._pipe(self._process.stdout).readline())

    def has_said(self, seconds: float) -> bool:
        """Wait for a line for so long at most."""
        return bool(select.select([self._pipe(self._process.stdout)], [], [], seconds)[0])

    def go(self) -> None:
        self._stopped += time.perf_counter() - self._since
        _STOPPED.pack_into(self._clock, 0, self._stopped)
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        self._since = time.perf_counter()

    def alone(self, line: str) -> Any:
        """Say a line and hear the answer, in one turn."""
        self.say(line)
        self.go()
        told = self.heard()
        self.stop()
        return told

    def end(self) -> Any:
        """The last line, said when there is nothing more to read."""
        self._pipe(self._process.stdin).close()
        self.go()
        told = self.heard()
        self._process.wait()
        self._folder.cleanup()
        return told

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def in_turns(programs: Sequence[Frozen], line: str, seconds: float) -> list[Any]:
    """What each answers to a line. They take turns of so many seconds until all have answered."""
    told: dict[Frozen, Any] = {}
    for program in programs:
        program.say(line)
    while len(told) < len(programs):
        for program in programs:
            if program in told:
                continue
            program.go()
            if program.has_said(seconds):
                told[program] = program.heard()
            program.stop()
    return [told[program] for program in programs]


def _under(clock: Path) -> None:
    """Leave out stopped time from the clock of this process."""
    with clock.open("rb") as file:
        stopped = mmap.mmap(file.fileno(), _STOPPED.size, access=mmap.ACCESS_READ)
    real = time.perf_counter
    time.perf_counter = lambda: real() - _STOPPED.unpack_from(stopped)[0]


if __name__ == "__main__":
    _under(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
