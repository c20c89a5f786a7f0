"""Fair queues for a few slots. Waiting requests are served client by client, so a client with a hundred requests delays another
client by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

from outrider.server.failures import ApiError


@final
class FairSlots:
    """A number of slots, and a queue for each client. For one event loop."""

    def __init__(self, num_places: int, *, max_waiting: int) -> None:
        """``max_waiting``: most waiting requests of one client."""
        self._num_free, self._max_waiting = num_places, max_waiting
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        await self._enter(client)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, client: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        queue = self._queues.setdefault(client, deque())
        if len(queue) >= self._max_waiting:
            message = f"{len(queue)} grammars of this client wait to be compiled already; try again in a moment"
            raise ApiError(429, message, kind="rate_limit_error", code="too_many_grammars")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # it was its turn already: the next one has it
            raise

    def _leave(self) -> None:
        """Give the slot to the next client's first request."""
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            del self._queues[client]
            turn = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind the other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
