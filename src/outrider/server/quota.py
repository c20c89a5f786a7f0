"""Limits of one key: requests and tokens per minute, concurrent requests, tokens of an answer.

Requests and tokens are buckets that fill up evenly over a minute. A request is admitted while the bucket of tokens holds any,
and its tokens are subtracted when it has ended. A bucket below zero has to fill up before the next request is admitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from outrider.server.failures import ApiError


@dataclass(frozen=True)
class Client:
    """The client that sent a request, with its limits."""

    name: str
    """The key's name, or the address if no key is required. Fair queues tell clients apart by it."""
    max_tokens: int | None = None
    """Most tokens of an answer, if the key has such a limit."""


@final
class Bucket:
    """A token bucket: a rate per minute, with bursts of up to one minute's worth."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = float(per_minute), clock
        self._level, self._at = self._most, clock()

    def wait_s(self, amount: float = 0.0) -> float:
        """Seconds until the bucket holds ``amount``, or anything at all if none is given; 0 if it does now."""
        self._fill()
        missing = max(amount - self._level, 0.0) if amount else float(self._level <= 0) - min(self._level, 0.0)
        return missing * 60.0 / self._most

    def take(self, amount: float) -> None:
        self._fill()
        self._level -= amount

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._most / 60.0)
        self._at = now


@final
class KeyUsage:
    """Usage of a key so far."""

    def __init__(self, name: str, limits: Mapping[str, int | None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.num_running, self._clock = name, 0, clock
        self.set_limits(limits)

    def set_limits(self, limits: Mapping[str, int | None]) -> None:
        """Set new limits, with full buckets. Running requests continue and are counted."""
        self.limits = dict(limits)
        requests, tokens = self.limits.get("requests_per_minute"), self.limits.get("tokens_per_minute")
        self._requests = Bucket(requests, self._clock) if requests else None
        self._tokens = Bucket(tokens, self._clock) if tokens else None

    @property
    def client(self) -> Client:
        return Client(self.name, self.limits.get("max_tokens"))

    def enter(self) -> None:
        """Admit a request, or say when to retry. Whoever entered must ``leave``."""
        most = self.limits.get("max_concurrent")
        if most is not None and self.num_running >= most:
            raise _over(f"this key has {most} requests running already", 1.0)
        if self._requests is not None:
            self._check(self._requests, 1.0, "requests")
        if self._tokens is not None:
            self._check(self._tokens, 0.0, "tokens")
        if self._requests is not None:
            self._requests.take(1.0)
        self.num_running += 1

    def leave(self, num_tokens: int) -> None:
        """Count a finished request's tokens, prompt and answer."""
        self.num_running -= 1
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def _check(self, bucket: Bucket, amount: float, noun: str) -> None:
        wait = bucket.wait_s(amount)
        if wait > 0:
            raise _over(f"this key has used its {self.limits[f'{noun}_per_minute']} {noun} a minute", wait)


def _over(what: str, retry_s: float) -> ApiError:
    return ApiError(429, f"{what}; try again in {max(1, round(retry_s))} s", kind="rate_limit_error", retry_s=retry_s)
