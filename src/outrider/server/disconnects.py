"""Clients that leave: work that ends with its client, and streams that end with theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, final

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_READING_S = 30.0
"""Time for a client to read the rest of a stream after the time limit."""


@final
class EventStream(StreamingResponse):
    """Server-sent events with a callback at their end, however they end."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None], *, limit_s: float) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close, self._limit_s = close, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limit_s + _READING_S):  # a client that does not read must not stay for ever
                await super().__call__(scope, receive, send)
        except TimeoutError:
            return
        finally:
            self._close()


async def unless_left(http: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``, or None if the client left first."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, left):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        continue
