"""Runs the application: sockets, signals, logs. SIGTERM and SIGINT let running requests finish, then the process exits 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import uvicorn
from starlette.types import ASGIApp

from outrider.core.allocator import settle
from outrider.core.errors import OptionError
from outrider.server.app import create_app
from outrider.server.connections import Door, GuardedProtocol
from outrider.server.logs import log_loop_errors
from outrider.server.service import Service
from outrider.server.settings import ServerSettings


@final
class _Server(uvicorn.Server):
    """uvicorn's server with our signal handling: a drained server exits with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Bind the socket before anything is loaded, so that a busy port is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, so that asyncio turns Nagle's delay off
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OptionError(f"{host}:{port} cannot be opened ({error.strerror}); choose another --port") from None
    return listener


def serve(
    service: Service,
    listener: socket.socket,
    *,
    page: str = "",
    on_ready: Callable[[int], None] | None = None,
    on_drain: Callable[[], None] = lambda: None,
    others: Sequence[Service] = (),
) -> None:
    """Serve until a signal. Returns when all running requests have finished, or after ``drain_s``. ``on_drain`` is called
    at the signal. ``others`` are further models, served with the settings of the first."""
    services = [service, *others]

    def drain() -> None:
        on_drain()
        for one in services:
            one.is_draining = True

    serve_app(
        create_app(service, page, others=others), service.settings, listener, signals=Signals(drain, None), on_ready=on_ready
    )


@dataclass(frozen=True)
class Signals:
    """Reactions of a served application to signals."""

    drain: Callable[[], None]
    """Called at SIGTERM or SIGINT: no new requests follow. A second signal ends the process at once."""
    hang_up: Callable[[], None] | None
    """Called at SIGHUP; None leaves the signal's default."""


def serve_app(
    app: ASGIApp,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    signals: Signals,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve any application under the limits of ``settings`` until a signal."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        timeout_keep_alive=30,
        backlog=256,
        lifespan="on",
        http=cast(Any, partial(GuardedProtocol, door=Door.of(settings))),
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    asyncio.run(_serve(_Server(config), signals, listener, on_ready))


async def _serve(server: _Server, signals: Signals, listener: socket.socket, on_ready: Callable[[int], None] | None) -> None:
    def drain() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        signals.drain()

    loop = asyncio.get_running_loop()
    log_loop_errors(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    if signals.hang_up is not None:
        loop.add_signal_handler(signal.SIGHUP, signals.hang_up)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    settle()
    if on_ready is not None and server.started:
        on_ready(listener.getsockname()[1])
    await serving
