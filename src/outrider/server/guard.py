"""In front of everything: who may come in, how much they may send and how slowly, and a line in the log for each of them.

Plain ASGI, so that streams pass through untouched. Bodies are read here, against a limit in bytes and in seconds: a client
that sends too much or never finishes costs one waiting coroutine and reaches nothing behind this.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from typing import final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.failures import ApiError
from outrider.server.metrics import Metrics
from outrider.server.settings import LOOPBACK, ServerSettings

_LOG = logging.getLogger("outrider.access")
_BODY_S = 30.0


@final
class Guard:
    """Keys, hosts, sizes, and the log."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, number = time.perf_counter(), 499, uuid.uuid4().hex[:12]  # 499: the client left before an answer

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        try:
            self._check(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _replaying(body, receive), watched)
        except ApiError as error:
            await error.response()(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - began
            self._metrics.requests.labels(str(status)).inc()
            line = {"event": "request", "id": number, "method": scope["method"], "path": scope["path"], "status": status}
            _LOG.info(json.dumps({**line, "seconds": round(seconds, 4), **scope.get("outrider.log", {})}))

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").rpartition(":")[0].strip("[]") or headers.get("host", "")
        if self._settings.is_local and host and host not in LOOPBACK:  # a page elsewhere must not reach us by renaming itself
            raise ApiError(403, f"this server answers only as localhost, not as {host!r}; start it with --host to change that")
        if self._settings.api_keys and scope["path"].startswith("/v1/"):
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not any(hmac.compare_digest(given, key.encode()) for key in self._settings.api_keys):
                raise ApiError(401, "a valid API key is needed: send it as 'Authorization: Bearer KEY'")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._settings.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_S):
                while True:
                    message = await receive()
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        raise _too_large(limit)
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(408, f"the request's body did not come within {_BODY_S:g} s") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit} bytes; send less, or raise --max-body-bytes")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes after it."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
