"""A process that tries grammars (``codecs/grammar_trial.py``) and is killed when one takes too long or nobody waits."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from outrider.codecs import grammar_trial

_START_S = 60.0
"""Longest that a process may take to read the vocabulary."""


class TrialEnded(Exception):  # noqa: N818
    """The process was killed, or died, before it had an answer."""


@dataclass(frozen=True)
class Tried:
    """What a trial found."""

    error: str
    """Empty for a grammar that can be used."""
    seconds: float
    num_bytes: int


@final
class Trial:
    """One process. Blocking: ``ask`` belongs on a thread, ``kill`` may come from any other."""

    def __init__(self, tokenizer: str, end_ids: list[int], *, max_bytes: int) -> None:
        command = [sys.executable, "-P", grammar_trial.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
        )
        self._first = {"tokenizer": tokenizer, "end_ids": end_ids, "max_bytes": max_bytes}
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, source: str, *, seconds: float) -> Tried:
        """Try a grammar; ``TrialEnded`` if there is no answer within ``seconds``."""
        if not self._is_ready:
            self._exchange(self._first, _START_S)
            self._is_ready = True
        answer = self._exchange(source, seconds)
        return Tried(answer["error"], answer["seconds"], answer["bytes"])

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process and wait for it."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _exchange(self, question: Any, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            raise TrialEnded
        return json.loads(line)
