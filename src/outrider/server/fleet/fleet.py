"""The interface of a front door to its replicas. ``ray_fleet.py`` implements it with Ray Serve; tests have one of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from starlette.types import Message

from outrider.server.fleet.carried import NOTHING, Carried
from outrider.server.quota import Client

Routing = Literal["prefix", "random"]
LOG = "outrider.log"
"""Type of the message after an answer that holds the request's usage, for quotas and the audit log."""


class ReplicaLost(Exception):  # noqa: N818 (an event, which the front door handles)
    """The replica of a request ended before it answered."""


@dataclass(frozen=True)
class Call:
    """A request as it is sent to a replica."""

    scope: Mapping[str, Any]
    """The serialisable parts of the ASGI scope."""
    body: bytes
    client: Client
    carried: Carried = NOTHING
    """Stored responses that the request refers to."""

    @staticmethod
    def of(scope: Mapping[str, Any], body: bytes, carried: Carried = NOTHING) -> Call:
        kept = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "root_path", "asgi")
        plain = {name: scope[name] for name in kept if name in scope}
        return Call({**plain, "client": tuple(scope.get("client") or ()) or None}, body, scope["outrider.client"], carried)


class Fleet(ABC):
    """Replicas that can be asked."""

    @abstractmethod
    def ask(self, text: str, call: Call) -> AsyncGenerator[Sequence[Message], None]:
        """The messages of an answer in groups, as they arrive, then one of type ``LOG``. ``text`` is what the request is
        routed by. Raises ``ReplicaLost`` if the replica ends, an ``ApiError`` if no replica takes the request."""

    @abstractmethod
    async def metrics(self) -> Mapping[str, bytes]:
        """The metrics of every reachable replica in Prometheus' format, by replica name."""

    @abstractmethod
    async def loads(self) -> Mapping[str, Mapping[str, int]]:
        """The ``/load`` of every reachable replica."""

    @abstractmethod
    async def replace_draft(self, name: str) -> str | None:
        """Let one replica read its draft again while it serves. Returns the error, empty if none; None if the replica has
        ended."""

    @final
    async def swap_drafts(self) -> Mapping[str, str]:
        """Replace the drafts of all replicas, one after the other. Returns the errors by replica, empty if none.

        The next one begins when the one before uses the new draft, so at most one replica holds two drafts. A draft that
        one replica refuses is offered to no other. Replicas that start later read the new draft anyway.
        """
        told: dict[str, str] = {}
        bad = ""
        for name in sorted(await self.loads()):
            wrong = f"not offered, since {bad} could not take it" if bad else await self.replace_draft(name)
            if wrong is not None:
                told[name] = wrong
                bad = bad or (name if wrong else "")
        return told
