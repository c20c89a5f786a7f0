"""One replica: the routes of a server without its socket. It answers calls that a front door hands on.

Ray Serve makes an object of ``Replica`` in a process of its own, asks ``check_health`` every second, and ends the process when
it is not well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from starlette.types import Message

from outrider.core.errors import OutriderError
from outrider.core.interfaces import Target
from outrider.core.request import Origin
from outrider.engine.replace_drafter import Learner
from outrider.server.app import open_app
from outrider.server.fleet.carried import SHELF, CarriedShelf
from outrider.server.fleet.fleet import LOG, Call
from outrider.server.models import Models
from outrider.server.service import Service

_LOG = logging.getLogger("outrider.server")
_TAKEN_S = 60.0
"""Longest wait for a running engine's next gap between rounds."""


@final
class NewDraft(Learner):
    """A draft model trained elsewhere, which the engine takes over between two rounds."""

    def __init__(self) -> None:
        self._offered: Target | None = None
        self._is_taken = threading.Event()

    def offer(self, draft: Target, *, limit_s: float = _TAKEN_S) -> None:
        """Wait until the engine has taken the draft. Not for the engine's own thread."""
        self._is_taken.clear()
        self._offered = draft
        if not self._is_taken.wait(limit_s):
            self._offered = None
            raise TimeoutError(f"the engine did not take the new draft within {limit_s:g} s; send the signal again")

    def observe(self, prompt_ids: Sequence[int], token_ids: Sequence[int], origins: Sequence[Origin]) -> None:
        del prompt_ids, token_ids, origins  # nothing is learnt here

    def maybe_update(self, *, is_idle: bool = True) -> Target | None:
        del is_idle  # it is ready
        offered, self._offered = self._offered, None
        if offered is not None:
            self._is_taken.set()
        return offered

    def close(self) -> None:
        self._offered = None


Opened = tuple[Sequence[Service], Callable[[], None]]
"""The services of a replica, and the function that reads its draft again."""


@final
class Replica:
    """One or several served models without an address of their own."""

    def __init__(self, name: str, opened: Opened, page: str = "") -> None:
        services, self._read_draft = opened
        self.name, self._models = name, Models(services)
        self._app = open_app(self._models, page, shelf_of=lambda http: http.scope[SHELF])
        self._models.start()

    async def answer(self, text: str, call: Call) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages of an answer, in groups. ``text`` is used by the router only."""
        del text
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        scope = {**call.scope, "outrider.client": call.client, SHELF: CarriedShelf(call.carried, said.put_nowait)}
        has_left = asyncio.Event()
        running = asyncio.ensure_future(self._run(scope, call.body, said, has_left))
        try:
            is_over = False
            while not is_over:
                group = [await said.get()]
                while not said.empty():
                    group.append(said.get_nowait())
                is_over = None in group
                yield [message for message in group if message is not None]
            await running
            yield [{"type": LOG, "told": scope.get(LOG, {})}]
        finally:
            has_left.set()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def _run(self, scope: dict[str, Any], body: bytes, said: asyncio.Queue[Message | None], left: asyncio.Event) -> None:
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, receive, said.put)
        finally:
            said.put_nowait(None)

    async def metrics(self) -> tuple[str, bytes]:
        return self.name, self._models.metrics_text()

    async def load(self) -> tuple[str, Mapping[str, int]]:
        """The ``/load`` of this replica."""
        schedulers = [service.worker.scheduler for service in self._models]
        counts = {"waiting": sum(one.num_waiting for one in schedulers), "running": sum(one.num_running for one in schedulers)}
        return self.name, {"server_load": sum(one.num_active for one in self._models), **counts}

    def check_health(self) -> None:
        """Raise if an engine does not run."""
        dead = [service.name for service in self._models if not service.worker.is_alive]
        if dead:
            raise RuntimeError(f"the engine of {', '.join(dead)} is not running")

    def enough(self, default: float) -> float:
        """Requests that fill this replica, by goodput. Of several models, the one that is full first counts."""
        return min(service.metrics.goodput.enough(default) for service in self._models)

    async def replace_draft(self, name: str) -> tuple[str, str]:
        """Read the draft model's folder again, and use it from the next round. An unreadable folder changes nothing.
        Returns this replica's name and the error, empty if none. Another replica's ``name`` does nothing."""
        if name != self.name:
            return self.name, ""
        try:
            await asyncio.to_thread(self._read_draft)
        except (OutriderError, OSError, ValueError) as error:
            _LOG.error("the draft model of before goes on: %s", error)
            return self.name, str(error)
        return self.name, ""

    def close(self) -> None:
        self._models.drain()
        self._models.close()
