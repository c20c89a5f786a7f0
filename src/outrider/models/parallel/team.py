"""The followers of a divided model: processes of this machine that the leader starts, tells what to do and watches.

A follower reads messages from its standard input and answers once, when its weights are read. It ends when the pipe does, so
none outlives its leader. If a rank dies, the pass that waits for it fails. The leader then finds out which rank it was, ends
the others, and reports it in every later call. Nothing is restarted, because the dead rank's caches are lost.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import torch

from outrider.core.errors import RankError
from outrider.models.companion import Companion
from outrider.models.parallel.link import open_store
from outrider.models.parallel.rank import Opening, Rank

_FOLLOWER = "outrider.models.parallel.follower"
_NOTICE_S = 3.0
"""Longest wait for the system to say which process died, after a pass broke."""


@final
class RankTeam:
    """All followers of a model."""

    def __init__(self, opening: Opening) -> None:
        self.size = opening.size
        self._store = open_store()
        num_threads = max(1, torch.get_num_threads() // self.size)
        ranks = range(1, self.size)
        self.followers = [
            Companion(
                f"rank {rank} of {self.size}",
                _FOLLOWER,
                (opening, rank, self._store.port),
                place=str(opening.device_of(rank)),
                num_threads=num_threads,
            )
            for rank in ranks
        ]
        self._notes: deque[tuple[str, Sequence[Any]]] = deque()
        self._loss: str | None = None
        self._closed = weakref.finalize(self, _end_all, self.followers)

    def connect(self, leader: Rank) -> None:
        """Wait until every rank has read its share, then connect them."""
        for follower in self.followers:
            if not follower.is_ready():
                follower.process.wait()
                self._lose(follower)
        try:
            for follower in self.followers:
                follower.tell([("connect", ())])
            leader.link.connect(self._store, leader.device)
        except (OSError, RuntimeError) as error:
            self._explain(error)

    def note(self, verb: str, arguments: Sequence[Any]) -> None:
        """Queue a message for the followers, sent with the next ``tell``."""
        self._notes.append((verb, arguments))

    def tell(self, verb: str, arguments: Sequence[Any]) -> None:
        """Send a message now, so that the followers begin together with the leader."""
        if self._loss is not None:
            raise RankError(self._loss)
        message = [self._notes.popleft() for _ in range(len(self._notes))] + [(verb, arguments)]
        try:
            for follower in self.followers:
                follower.tell(message)
        except OSError as error:
            self._explain(error)

    def guarded(self, leader: Rank, verb: str, arguments: Sequence[Any]) -> Any:
        """Run the leader's own part of a call. If it fails, the others would wait forever, so the model ends."""
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
        """Raise an error that names the rank that died; if none did, raise the original error."""
        deadline = time.monotonic() + _NOTICE_S
        while self._loss is None and time.monotonic() < deadline:
            gone = next((one for one in self.followers if one.process.poll() is not None), None)
            if gone is not None:
                self._lose(gone, error)
            time.sleep(0.02)
        self._loss = self._loss or f"the leader's pass failed ({error}); load the model again"
        self.close()
        raise error

    def _lose(self, gone: Companion, cause: BaseException | None = None) -> None:
        self._loss = f"{gone.describe_end()}; a divided model cannot go on without it: load the model again"
        self.close()
        raise RankError(self._loss) from cause


def _end_all(followers: Sequence[Companion]) -> None:
    for follower in followers:
        follower.end()


def watch(team: RankTeam, say: Any) -> threading.Thread:
    """Start a thread that calls ``say`` with the name of a follower that dies."""

    def look() -> None:
        found = team.wait_for_loss()
        if found is not None:
            say(found)

    thread = threading.Thread(target=look, name="outrider-ranks", daemon=True)
    thread.start()
    return thread
