"""The front door of a fleet: an ASGI application that passes every request to a replica, and the answer back.

A replica can end in the middle of an answer (killed, out of memory, its machine gone). While the client has seen nothing of the
answer, another replica is asked: generating has no side effects, so asking twice is safe. This happens once per request, so
that a request which kills its replica cannot kill them all. If the client has seen a part, or the second replica ends too, it
gets an error. Its code is ``replica_lost``, and it says that the request can be sent again. A request that no replica takes or
answers in time gets status 504.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.app import cross_origin, stored_app
from outrider.server.audit import AuditLog
from outrider.server.disconnects import unless_left
from outrider.server.failures import ApiError, late
from outrider.server.fleet.affinity import routed_text
from outrider.server.fleet.carried import KEPT, NOTHING, Carried
from outrider.server.fleet.fleet import LOG, Call, Fleet, ReplicaLost
from outrider.server.fleet.merged import FrontMetrics, Merged
from outrider.server.guard import Guard
from outrider.server.keys import KeyRing
from outrider.server.response_store import ResponseStore, Shelf
from outrider.server.settings import ServerSettings

_TRIES = 2
_GRACE_S = 40.0
"""Time beyond a replica's own limit and the time it gives slow clients, before the front door gives up."""
_STREAM = b"text/event-stream"


def lost(*, is_begun: bool) -> ApiError:
    """The error for a client whose replica died."""
    what = "in the middle of this answer" if is_begun else "before this request was answered"
    message = f"the replica ended {what}; nothing is wrong with the request: send it again"
    return ApiError(503, message, kind="server_error", code="replica_lost")


def guarded(fleet: Fleet, settings: ServerSettings, metrics: FrontMetrics) -> tuple[Front, ASGIApp]:
    """A front door, and the same behind the guard: keys, sizes, the log."""
    front = Front(fleet, settings, metrics)
    keys = KeyRing(settings.api_keys, Path(settings.api_key_file) if settings.api_key_file else None)
    audit = AuditLog(Path(settings.audit_log) if settings.audit_log else None)
    app: ASGIApp = Guard(front, settings, metrics.requests, keys, audit)
    return front, CORSMiddleware(app, **cross_origin(settings)) if settings.cors_origins else app


@final
class Front:
    """Hands requests to a fleet."""

    def __init__(self, fleet: Fleet, settings: ServerSettings, metrics: FrontMetrics, *, grace_s: float = _GRACE_S) -> None:
        """``grace_s``: how much longer it waits than the replicas."""
        self._fleet, self._metrics = fleet, metrics
        self._limit_s = settings.timeout_s + grace_s
        self._store = ResponseStore(settings.store_limits)
        self._stored = stored_app(self._store)
        metrics.stored.watch(self._store)
        self.is_draining = False
        self._own = {"/health": self._health, "/ping": self._health, "/load": self._load, "/metrics": self._all_metrics}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["path"].startswith("/v1/responses/"):
            await self._stored(scope, receive, send)
            return
        try:
            own = self._own.get(scope["path"])
            response = await own() if own else await self._handed_on(scope, receive, send)
        except ApiError as error:
            response = error.response()
        if response is not None:
            await response(scope, receive, send)

    def drain(self) -> None:
        """Report in health checks that the server is about to end."""
        self.is_draining = True

    async def _health(self) -> Response:
        """Health: good while any replica is."""
        loads = await self._fleet.loads()
        is_well = bool(loads) and not self.is_draining
        state = "ok" if is_well else "draining" if self.is_draining else "no replica answers"
        told = {"status": state, "replicas": len(loads), "requests": _total(loads).get("server_load", 0)}
        return JSONResponse(told, 200 if is_well else 503)

    async def _load(self) -> Response:
        loads = await self._fleet.loads()
        return JSONResponse({**_total(loads), "replicas": dict(loads)})

    async def _all_metrics(self) -> Response:
        told = await self._fleet.metrics()
        self._metrics.replicas.set(len(told))
        return Response(Merged(self._metrics, told).text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _handed_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")  # the guard has read all of it
        shelf = self._store.of(scope["outrider.client"].name)
        carried = Carried.of(body, shelf, self._store.limits.most_bytes) if scope["path"] == "/v1/responses" else NOTHING
        answer = _Answer(scope, send, shelf)
        text = routed_text(body, carried.previous[1] if carried.previous else ())
        await unless_left(HttpRequest(scope, receive), self._asked(text, Call.of(scope, body, carried), answer))

    async def _asked(self, text: str, call: Call, answer: _Answer) -> None:
        """Ask one replica, and another if the first is lost before the client saw anything."""
        deadline = asyncio.get_running_loop().time() + self._limit_s
        for left in reversed(range(_TRIES)):
            try:
                async with asyncio.timeout_at(deadline), aclosing(self._fleet.ask(text, call)) as groups:
                    async for group in groups:
                        await answer.take(group)
                await answer.close()
                return
            except TimeoutError:
                await answer.fail(late(self._limit_s))
                return
            except ReplicaLost:
                self._metrics.lost.inc()
                if answer.is_begun or not left:
                    await answer.fail(lost(is_begun=answer.is_begun))
                    return
                self._metrics.repeated.inc()
                answer.held.clear()


@dataclass(eq=False)
class _Answer:
    """The part of the answer that was sent to the client so far. Answers that are not streams are held until complete."""

    scope: Scope
    send: Send
    shelf: Shelf
    is_begun: bool = False
    held: list[Message] = field(default_factory=list)
    num_events: int = 0

    async def take(self, group: Sequence[Message]) -> None:
        for message in group:
            if message["type"] == LOG:
                self.scope.setdefault(LOG, {}).update(message["told"])
            elif self.is_begun:
                await self._pass_on(message)
            else:
                self.held.append(message)
        if not self.is_begun and any(_is_stream(message) for message in self.held) and len(self.held) > 1:
            await self._release()

    async def close(self) -> None:
        """Send the complete answer: the replica has finished."""
        await self._release()

    async def fail(self, error: ApiError) -> None:
        """End with an error: a proper response, or an event where the stream has begun."""
        if not self.is_begun:
            raise error
        event = {"type": "error", **error.body["error"], "sequence_number": self.num_events}
        is_typed = self.scope["path"] == "/v1/responses"
        text = f"event: error\ndata: {json.dumps(event)}\n\n" if is_typed else f"data: {json.dumps(error.body)}\n\n"
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": False})

    async def _release(self) -> None:
        self.is_begun = True
        for message in self.held:
            await self._pass_on(message)
        self.held.clear()

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == KEPT:
            self.shelf.keep(message["response"], message["said"])
            return
        self.num_events += message.get("body", b"").count(b"\n\n")
        await self.send(message)


def _is_stream(message: Message) -> bool:
    headers = message.get("headers", ())
    return any(name.lower() == b"content-type" and value.startswith(_STREAM) for name, value in headers)


def _total(loads: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    names = {name for load in loads.values() for name in load}
    return {name: sum(load.get(name, 0) for load in loads.values()) for name in sorted(names)}


async def _live(receive: Receive, send: Send) -> None:
    """ASGI's lifespan messages. Replicas start and stop by themselves, so they are only acknowledged."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
