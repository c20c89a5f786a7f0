"""Limits before there is a request: connections per client, and the time for headers.

A client that opens connections and sends nothing, or a header a minute, costs a file descriptor until its time is over.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, final

from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.server.failures import ApiError
from outrider.server.settings import ServerSettings


@dataclass(eq=False)
class Door:
    """The open connections and their limits."""

    max_total: int
    max_each: int
    header_s: float
    held: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(settings: ServerSettings) -> Door:
        return Door(
            min(settings.max_connections, _num_files() - 64), settings.max_client_connections, settings.header_timeout_s
        )

    def enter(self, client: str) -> ApiError | None:
        """Count a connection. Returns an error if it is one too many. Every counted connection must ``leave``."""
        self.held[client] += 1
        if self.held[client] > self.max_each:
            message = f"this client holds {self.max_each} connections already; close some, or send requests over them"
            return ApiError(429, message, kind="rate_limit_error", code="too_many_connections")
        if self.held.total() > self.max_total:
            return ApiError(503, "the server has no connection left; try again in a moment", kind="server_error")
        return None

    def leave(self, client: str) -> None:
        self.held[client] -= 1
        if not self.held[client]:
            del self.held[client]


@final
class GuardedProtocol(H11Protocol):
    """One connection: uvicorn's HTTP protocol with a door in front of it."""

    def __init__(self, *, door: Door, **more: Any) -> None:
        super().__init__(**more)
        self._door, self._who = door, ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._who = self.client[0] if self.client else "local"
        refused = self._door.enter(self._who)
        if refused is not None:
            self._refuse(refused)
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._door.leave(self._who)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_asking:
            self._stop_timer()
        elif self._timer is None:
            self._expect_headers()  # a further request on the same connection has begun

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.trailing_data[0]:
            self._expect_headers()

    @property
    def _is_asking(self) -> bool:
        """Whether all headers of a request are here and it is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._door.header_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        if not self._is_asking and not self.transport.is_closing():
            self._refuse(ApiError(408, f"the headers did not come within {self._door.header_s:g} s; send them faster"))

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        head = f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.transport.close()


def _num_files() -> int:
    """Number of file descriptors the process may open, after raising its limit."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = min(hard, 65_536) if hard > 0 else 65_536
        if 0 < soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
        return soft if soft > 0 else 65_536
    except (ImportError, ValueError, OSError):
        return 1024
