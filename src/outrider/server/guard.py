"""The guard in front of all routes: it checks keys, limits the size and duration of bodies, and logs every request.

It is plain ASGI, so that streams pass through unchanged. Bodies are read here, with limits in bytes and seconds. A client that
sends too much or never finishes costs one waiting coroutine, and reaches no route.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from itertools import islice
from typing import Any, final

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.audit import AuditLog
from outrider.server.failures import ApiError
from outrider.server.keys import KeyRing
from outrider.server.quota import Client, KeyUsage
from outrider.server.settings import LOOPBACK, ServerSettings
from outrider.server.tidy import Tidy

_LOG = logging.getLogger("outrider.access")
_BODY_S = 30.0
_KEY, _KEY_COSTS = re.compile(rb'"\s*:'), 8
_REQUEST_ID = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_WATCHING = frozenset({"/health", "/ping", "/metrics", "/load", "/version"})
"""Paths that monitors poll every few seconds. They are not counted as requests, and not logged."""


@final
class Guard:
    """Keys, hosts, sizes, and the log."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, requests: Counter, keys: KeyRing, audit: AuditLog) -> None:
        """``requests`` counts them by status."""
        self._app, self._settings, self._requests = app, settings, requests
        self._keys, self._audit, self._tidy = keys, audit, Tidy()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, number = time.perf_counter(), 499, _number(scope)  # 499: the client left before an answer

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        account: KeyUsage | None = None
        try:
            self._check_host(scope)
            account = self._entered(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _replaying(body, receive), watched)
        except ApiError as error:
            await error.response()(scope, receive, watched)
        finally:
            told: dict[str, Any] = scope.get("outrider.log", {})
            if account is not None:
                account.leave(told.get("prompt_tokens", 0) + told.get("completion_tokens", 0))
            line = {"id": number, "method": scope["method"], "path": scope["path"], "status": status}
            self._note(scope, {**line, "seconds": round(time.perf_counter() - began, 4), **told})

    def _note(self, scope: Scope, line: dict[str, Any]) -> None:
        """Count a request, and log who asked what and when."""
        if scope["path"] in _WATCHING:
            return
        self._requests.labels(str(line["status"])).inc()
        _LOG.info(json.dumps({"event": "request", **line}))
        if _needs_key(scope["path"]):
            who: Client | None = scope.get("outrider.client")
            address = scope["client"][0] if scope.get("client") else "local"
            self._audit.note({"key": who.name if who else None, "address": address, **line})

    def _check_host(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").rpartition(":")[0].strip("[]") or headers.get("host", "")
        if self._settings.is_local and host and host not in LOOPBACK:  # a page elsewhere must not reach us by renaming itself
            raise ApiError(403, f"this server answers only as localhost, not as {host!r}; start it with --host to change that")

    def _entered(self, scope: Scope) -> KeyUsage | None:
        """Identify the client, and admit its request within the key's limits. Returns the account to leave later."""
        scope["outrider.client"] = Client(scope["client"][0] if scope.get("client") else "local")
        if not self._keys.is_asked_for or not _needs_key(scope["path"]):
            return None
        given = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
        account = self._keys.find(given)
        if account is None:
            raise ApiError(401, "a valid API key is needed: send it as 'Authorization: Bearer KEY'")
        scope["outrider.client"] = account.client
        if scope["method"] != "POST":
            return None
        account.enter()
        return account

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
                        break
        except TimeoutError:
            raise ApiError(408, f"the request's body did not come within {_BODY_S:g} s; send it faster") from None
        self._tidy.count(size)
        return self._checked(b"".join(chunks))

    def _checked(self, body: bytes) -> bytes:
        """The body, unless it has too many values. Parsing JSON blocks all threads, for a tenth of a second per million
        values, and nine times as long for a value with a key. Values are counted by their commas, keys by their colons. Those
        inside strings count too."""
        most = self._settings.max_body_values
        num_left = most - body.count(b",")
        if num_left < 0 or (_KEY_COSTS * body.count(b":") > num_left and _has_keys(body, num_left // _KEY_COSTS + 1)):
            message = f"the request has more than {most} values (a key counts as {_KEY_COSTS}); send fewer, "
            raise ApiError(413, message + "or raise --max-body-values", code="too_many_values")
        return body


def _has_keys(body: bytes, count: int) -> bool:
    """Whether the body has at least so many keys."""
    return next(islice(_KEY.finditer(body), count - 1, None), None) is not None


def _needs_key(path: str) -> bool:
    return path.startswith("/v1/") or path in ("/tokenize", "/detokenize")


def _number(scope: Scope) -> str:
    """The request id: the client's own if it is fit for a header and a log, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:12]


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit} bytes; send less, or raise --max-body-bytes")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """An ASGI ``receive`` that gives the body again, then the client's further messages."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
