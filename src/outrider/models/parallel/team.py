"""The followers of a divided model: processes of this machine that the leader starts, tells what to do and watches.

A follower reads messages from its standard input and answers once, when its weights are read. It ends when the pipe does, so
none outlives its leader. A rank that dies breaks the pass that waits for it; the leader then finds out which one it was, ends
the others, and says so in every later call. Nothing is restarted: what the dead rank held is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import IO, Any, final

import torch

from outrider.core.errors import RankError
from outrider.models.parallel.link import open_store
from outrider.models.parallel.rank import Opening, Rank

READY = b"ready\n"
_NOTICE_S = 3.0
"""Longest wait for the system to say which process died, after a pass broke."""


def write_message(to: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    to.write(struct.pack("<q", len(data)) + data)
    to.flush()


def read_message(source: IO[bytes]) -> Any:
    """The next message; None when the other side has gone."""
    header = source.read(8)
    if len(header) < 8:
        return None
    data = source.read(struct.unpack("<q", header)[0])
    return pickle.loads(data)


@final
class Follower:
    """A process with one share of the model."""

    def __init__(self, opening: Opening, rank: int, *, port: int, num_threads: int) -> None:
        self.rank, self._opening = rank, opening
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(num_threads)}
        command = [sys.executable, "-m", "outrider.models.parallel.follower"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=env, start_new_session=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout
        self.tell((opening, rank, port))

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self._opening.size} (process {self.process.pid} on {self._opening.device_of(self.rank)})"

    def tell(self, message: Any) -> None:
        write_message(self._to, message)

    def wait_until_ready(self) -> bool:
        return self._from.readline() == READY

    def describe_end(self) -> str:
        """How it ended and what it said last."""
        code = self.process.returncode
        how = "did not answer" if code is None else f"ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip().splitlines()
        return f"{self.name} {how}" + (f" ({said[-1]})" if said else "")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._to, self._from, self._words):
            try:
                pipe.close()
            except OSError:  # what was not read cannot be flushed
                continue


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@final
class Team:
    """All followers of a model."""

    def __init__(self, opening: Opening) -> None:
        self.size = opening.size
        self._store = open_store()
        num_threads = max(1, torch.get_num_threads() // self.size)
        ranks = range(1, self.size)
        self.followers = [Follower(opening, rank, port=self._store.port, num_threads=num_threads) for rank in ranks]
        self._notes: deque[tuple[str, Sequence[Any]]] = deque()
        self._loss: str | None = None
        self._closed = weakref.finalize(self, _end_all, self.followers)

    def connect(self, leader: Rank) -> None:
        """Wait until every rank has read its share, then connect them."""
        for follower in self.followers:
            if not follower.wait_until_ready():
                follower.process.wait()
                self._lose(follower)
        try:
            for follower in self.followers:
                follower.tell([("connect", ())])
            leader.link.connect(self._store, leader.device)
        except (OSError, RuntimeError) as error:
            self._explain(error)

    def note(self, verb: str, arguments: Sequence[Any]) -> None:
        """Told with the next ``tell``."""
        self._notes.append((verb, arguments))

    def tell(self, verb: str, arguments: Sequence[Any]) -> None:
        """Told now: the followers begin while the leader does."""
        if self._loss is not None:
            raise RankError(self._loss)
        message = [self._notes.popleft() for _ in range(len(self._notes))] + [(verb, arguments)]
        try:
            for follower in self.followers:
                follower.tell(message)
        except OSError as error:
            self._explain(error)

    def guarded(self, leader: Rank, verb: str, arguments: Sequence[Any]) -> Any:
        """The leader's own part of a call. One that fails leaves the others waiting, so the model ends with it."""
        try:
            return vars(Rank)[verb](leader, *arguments)
        except BaseException as error:
            self._explain(error)

    def wait_for_loss(self, *, every_s: float = 0.5) -> str | None:
        """Blocks until a follower has died, and says which; None when the team was closed. For a thread that watches."""
        while self._closed.alive and self._loss is None:
            gone = next((one for one in self.followers if one.process.poll() is not None), None)
            if gone is not None and self._closed.alive:
                return gone.describe_end()
            time.sleep(every_s)
        return self._loss

    def close(self) -> None:
        """End all followers."""
        self._closed()

    def _explain(self, error: BaseException) -> None:
        """Say whose fault a broken pass was, if a rank died; raise the error itself if none did."""
        deadline = time.monotonic() + _NOTICE_S
        while self._loss is None and time.monotonic() < deadline:
            gone = next((one for one in self.followers if one.process.poll() is not None), None)
            if gone is not None:
                self._lose(gone, error)
            time.sleep(0.02)
        self._loss = self._loss or f"the leader's pass failed ({error}); load the model again"
        self.close()
        raise error

    def _lose(self, gone: Follower, cause: BaseException | None = None) -> None:
        self._loss = f"{gone.describe_end()}; a divided model cannot go on without it: load the model again"
        self.close()
        raise RankError(self._loss) from cause


def _end_all(followers: Sequence[Follower]) -> None:
    for follower in followers:
        follower.end()


def watch(team: Team, say: Any) -> threading.Thread:
    """A thread that calls ``say`` with the name of a follower that dies."""

    def look() -> None:
        found = team.wait_for_loss()
        if found is not None:
            say(found)

    thread = threading.Thread(target=look, name="outrider-ranks", daemon=True)
    thread.start()
    return thread
