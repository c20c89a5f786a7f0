"""Routing of prompts to replicas: to the one that has read the same beginning before, unless it is much busier than the others.

A replica keeps keys and values of the beginnings it has read, and its copying drafters remember its texts. Both help only if
the next request with that beginning goes to the same replica. The routing table holds hashes of beginnings, not texts. An
unknown beginning goes to the replica that a hash of its first piece selects (rendezvous hashing: Thaler and Ravishankar, 1998).
So two front doors agree without communication, and a replica that leaves moves only its own prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

_PIECE = 32
"""Characters per piece. Prefixes are compared by whole pieces."""
_MOST_PIECES = 256
_MOST_KNOWN = 100_000
SLACK = 4
"""A replica with this many more requests than the least busy one is skipped."""


def routed_text(body: bytes, earlier: Sequence[Any] = ()) -> str:
    """The text by which a request is routed: its model, its salt, and its prompt or messages. Empty if nothing can be
    shared. ``earlier`` are the items of a stored conversation that it continues."""
    try:
        asked = json.loads(body) if body else None
    except ValueError:
        return ""  # the replica will refuse it, with a reason
    if not isinstance(asked, dict):
        return ""
    prompt = next((asked[name] for name in ("prompt", "messages") if asked.get(name)), None)
    if prompt is None and asked.get("input"):
        given = asked["input"]
        prompt = [_said(item) for item in (*earlier, *(given if isinstance(given, list) else [given]))]
    if prompt is None:
        return ""
    told = [asked.get("model"), asked.get("cache_salt"), asked.get("instructions")]
    return "\x00".join(str(part or "") for part in told) + "\x00" + _flat(prompt)


def _said(item: Any) -> Any:
    """The content of an item of /v1/responses, without what is not in every form of it."""
    content = item.get("content", item) if isinstance(item, dict) else item
    return (
        [part.get("text", part) if isinstance(part, dict) else part for part in content]
        if isinstance(content, list)
        else content
    )


def _flat(prompt: Any) -> str:
    """A text unchanged; lists and messages flattened in order, so that a conversation is a prefix of its continuation."""
    if isinstance(prompt, str):
        return prompt
    parts = prompt.values() if isinstance(prompt, dict) else prompt if isinstance(prompt, list) else [str(prompt)]
    return "\x01".join(part if isinstance(part, str) else _flat(part) for part in parts)


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\x00".join(parts), digest_size=8).digest()


def _beginnings(text: str) -> Iterator[bytes]:
    """A hash of every prefix of whole pieces, the shortest first. A short text is one piece."""
    known = b""
    for start in range(0, min(max(len(text) // _PIECE, 1), _MOST_PIECES) * _PIECE, _PIECE):
        known = _hash(known, text[start : start + _PIECE].encode("utf-8", "surrogatepass"))
        yield known


@final
class Affinity:
    """A table of prefixes and the replicas that have read them, in order of last use."""

    def __init__(self, *, slack: int = SLACK, most_known: int = _MOST_KNOWN) -> None:
        self._slack, self._most = slack, most_known
        self._readers: OrderedDict[bytes, frozenset[str]] = OrderedDict()

    def rank(self, text: str, loads: Mapping[str, int]) -> list[str]:
        """Replicas in the order in which to ask them. ``loads`` is the number of requests of each."""
        by_load = sorted(loads, key=lambda name: (loads[name], name))
        if not text or not loads:
            return by_load
        least = loads[by_load[0]]
        free = {name for name in loads if loads[name] <= least + self._slack}
        known = [name for name in by_load if name in self._longest(text, free)]
        first = known or sorted(free, key=lambda name: _hash(text[:_PIECE].encode("utf-8", "surrogatepass"), name.encode()))
        return [*first[:1], *(name for name in by_load if name != first[0])]

    def note(self, text: str, replica: str) -> None:
        """Record that a replica reads this text."""
        if not text:
            return
        for beginning in _beginnings(text):
            self._readers[beginning] = self._readers.pop(beginning, frozenset()) | {replica}
        while len(self._readers) > self._most:
            self._readers.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove a replica that is gone."""
        for beginning, readers in list(self._readers.items()):
            if readers == {replica}:
                del self._readers[beginning]
            elif replica in readers:
                self._readers[beginning] = readers - {replica}

    def _longest(self, text: str, among: set[str]) -> set[str]:
        """The replicas among ``among`` that have read the longest prefix of the text."""
        found: set[str] = set()
        for beginning in _beginnings(text):
            readers = self._readers.get(beginning, frozenset()) & among
            if not readers:
                break
            found = set(readers)
        return found
