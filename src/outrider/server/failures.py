"""Errors of the API: an HTTP status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from outrider.server.json_text import JsonAnswer


@final
class ApiError(Exception):
    """A request that gets an error object for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``retry_s``: when to try again, for an answer that says so (429, 503). ``headers``: others."""
        super().__init__(message)
        if len(message) > _LONGEST:  # what was wrong is quoted, and may be long
            message = message[: _LONGEST // 2] + " ... " + message[-_LONGEST // 2 :]
        self.status, self.message, self.kind, self.param = status, message, kind, param
        self.code, self.retry_s = code or _CODES.get(status), retry_s
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JsonAnswer:
        headers = {"Retry-After": str(max(1, math.ceil(self.retry_s)))} if self.status in (429, 503) else {}
        headers |= self.headers
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JsonAnswer(self.body, self.status, headers)


_LONGEST = 1000
_CODES = {
    401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 429: "rate_limit_exceeded",
    504: "timeout",
}  # fmt: skip


def busy(limit: int) -> ApiError:
    return ApiError(429, f"the server has {limit} requests already; try again in a moment", kind="rate_limit_error")


def broken(reason: str) -> ApiError:
    return ApiError(500, f"the engine failed ({reason}) and was restarted; send the request again", kind="server_error")


def failed(reason: str) -> ApiError:
    message = f"this request failed ({reason}) and the server's log says why; send it again, or leave out what is unusual in it"
    return ApiError(500, message, kind="server_error")


def late(seconds: float) -> ApiError:
    return ApiError(504, f"the request took longer than {seconds:g} s; ask for fewer tokens", kind="timeout_error")
