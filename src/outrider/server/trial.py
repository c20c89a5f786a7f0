"""A process that tries grammars (``codecs/grammar_trial.py``) and is killed when one takes too long or nobody waits.

It runs at a lower priority than the engine, because passes use all cores and wait for the slowest one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from outrider.codecs import grammar_trial

_START_S = 60.0
"""Longest time for a process to read the vocabulary."""
_PATIENCE = 4
"""Wall-clock limit of a trial, as a multiple of its processor time."""
_NICE = 10
"""How much lower a trial's priority is than the server's. Beside a busy engine it gets a tenth of a core."""


class TrialEnded(Exception):  # noqa: N818
    """The process was killed or died before it answered, at one of its limits."""


class TrialLost(Exception):  # noqa: N818
    """Somebody else killed the process, so nothing is known of the grammar."""


@dataclass(frozen=True)
class Tried:
    """Result of a trial."""

    error: str
    """The error; empty if the grammar can be used."""
    seconds: float
    num_bytes: int


@final
class TrialProcess:
    """One process. ``ask`` blocks, so it belongs on a thread; ``kill`` may be called from any other."""

    def __init__(self, first: bytes) -> None:
        """``first`` is the result of ``first_line``. Starting takes milliseconds, so it belongs on a thread too."""
        command = [sys.executable, "-P", grammar_trial.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if sys.platform != "win32":
            with suppress(OSError):  # it has ended already, or may not be changed
                os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        self._first = first
        self._is_ready = self._is_killed = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, source: str, *, seconds: float) -> Tried:
        """Try a grammar. Raises ``TrialEnded`` after ``seconds`` of processor time, or a few times that by the clock."""
        if not self._is_ready:
            self._exchange(self._first, _START_S)
            self._is_ready = True
        answer = self._exchange(_line({"source": source, "seconds": seconds}), _PATIENCE * seconds)
        return Tried(answer["error"], answer["seconds"], answer["bytes"])

    def kill(self) -> None:
        self._is_killed = True
        self._process.kill()

    def close(self) -> None:
        """End the process and wait for it."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _exchange(self, question: bytes, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(question)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> TrialEnded | TrialLost:
        """Why there is no answer. The limits on time and memory have signals of their own."""
        self._process.wait()
        is_lost = not self._is_killed and self._process.returncode == -signal.SIGKILL if sys.platform != "win32" else False
        return TrialLost() if is_lost else TrialEnded()


def first_line(tokenizer: str, end_ids: list[int], *, max_bytes: int) -> bytes:
    """The first line that a process reads. It has megabytes for a large vocabulary, so make it once."""
    return _line({"tokenizer": tokenizer, "end_ids": end_ids, "max_bytes": max_bytes})


def _line(question: Any) -> bytes:
    return json.dumps(question).encode() + b"\n"
