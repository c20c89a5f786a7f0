"""Stored responses: limited in number, bytes and age. Each client sees only its own.

They are kept in memory and lost when the server ends. A response is stored with its whole conversation, so it can be continued
even when earlier responses are gone. Responses of one conversation share their items. When the store is full, the client with
the most bytes loses its oldest response, so no client can push out another's.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from outrider.server.failures import ApiError
from outrider.server.json_text import json_text
from outrider.server.response_items import Item, said_in

_OVERHEAD = 512
"""Bytes that an item or a response takes besides its JSON."""
_REFERENCE = 8
"""Bytes that a response takes for each item of its conversation, which other responses share."""
_LONGEST = 4_000_000
"""Most bytes of a conversation that is stored. A short request that continues it makes the server read it all."""


class Shelf(ABC):
    """The stored responses of one client."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether responses are stored at all."""

    @abstractmethod
    def conversation(self, response_id: str) -> list[Item]:
        """The conversation up to the end of a response."""

    @abstractmethod
    def item(self, item_id: str) -> Item:
        """An item of a stored conversation."""

    @abstractmethod
    def keep(self, response: Item, said: Sequence[Item]) -> bool:
        """Store a response to the conversation ``said``. False if it does not fit."""


@dataclass(frozen=True)
class StoreLimits:
    """Bounds of a store."""

    most: int
    """Most responses; 0 stores none."""
    most_bytes: int
    most_s: float
    """Seconds after which a response is forgotten."""


@dataclass(eq=False)
class _Item:
    """A stored item and the number of responses that hold it."""

    id: str
    text: str
    num_held: int = 0

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD + len(self.text.encode())


@dataclass(frozen=True, eq=False)
class _Response:
    """A stored response."""

    text: str
    said: Sequence[_Item]
    """The items that this response answers."""
    output: Sequence[_Item]
    at: float

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD + len(self.text.encode()) + _REFERENCE * (len(self.said) + len(self.output))


@dataclass(eq=False)
class _Owner:
    """Responses of one client, the oldest first, and their items by id."""

    responses: OrderedDict[str, _Response] = field(default_factory=OrderedDict)
    items: dict[str, _Item] = field(default_factory=dict)
    num_bytes: int = 0

    def held(self, item: Item) -> _Item:
        """An item as it is stored: an earlier one if it is the same."""
        text = json_text(item)
        known = self.items.get(item["id"])
        return known if known is not None and known.text == text else _Item(item["id"], text)

    def add(self, response_id: str, response: _Response) -> None:
        self.responses[response_id] = response
        self.num_bytes += response.num_bytes
        for item in (*response.said, *response.output):
            self.num_bytes += 0 if item.num_held else item.num_bytes
            item.num_held += 1
            self.items[item.id] = item

    def remove(self, response_id: str) -> None:
        response = self.responses.pop(response_id)
        self.num_bytes -= response.num_bytes
        for item in (*response.said, *response.output):
            item.num_held -= 1
            self.num_bytes -= 0 if item.num_held else item.num_bytes
            if not item.num_held and self.items.get(item.id) is item:
                del self.items[item.id]


@final
class ResponseStore:
    """The stored responses of all clients. For one thread."""

    def __init__(self, limits: StoreLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._owners: dict[str, _Owner] = {}
        self._ages: OrderedDict[str, str] = OrderedDict()
        """The client of each response, the oldest response first."""

    @property
    def num_responses(self) -> int:
        return len(self._ages)

    @property
    def num_bytes(self) -> int:
        return sum(owner.num_bytes for owner in self._owners.values())

    def of(self, client: str) -> OwnShelf:
        """The responses of one client."""
        return OwnShelf(self, client)

    def find(self, client: str, response_id: str) -> _Response | None:
        self._expire()
        owner = self._owners.get(client)
        return owner.responses.get(response_id) if owner else None

    def find_item(self, client: str, item_id: str) -> _Item | None:
        self._expire()
        owner = self._owners.get(client)
        return owner.items.get(item_id) if owner else None

    def add(self, client: str, response: Item, said: Sequence[Item]) -> bool:
        """Store a response. False if it was too large, or the first to go."""
        self._expire()
        if not fits(response, said, self.limits.most_bytes):
            return False
        owner = self._owners.setdefault(client, _Owner())
        items, output = [owner.held(item) for item in said], [owner.held(item) for item in said_in(response["output"])]
        made = _Response(json_text(response), items, output, self._clock())
        owner.add(response["id"], made)
        self._ages[response["id"]] = client
        while len(self._ages) > self.limits.most or self.num_bytes > self.limits.most_bytes:
            self._make_room()
        return response["id"] in self._ages

    def remove(self, client: str, response_id: str) -> None:
        """Forget a response that is there."""
        self._owners[client].remove(response_id)
        del self._ages[response_id]
        self._tidy(client)

    def _make_room(self) -> None:
        is_many = len(self._ages) > self.limits.most
        sizes = {name: len(one.responses) if is_many else one.num_bytes for name, one in self._owners.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        self.remove(largest, next(iter(self._owners[largest].responses)))

    def _expire(self) -> None:
        oldest = self._clock() - self.limits.most_s
        while self._ages:
            response_id, client = next(iter(self._ages.items()))
            if self._owners[client].responses[response_id].at >= oldest:
                return
            self.remove(client, response_id)

    def _tidy(self, client: str) -> None:
        if not self._owners[client].responses:
            del self._owners[client]


@final
class OwnShelf(Shelf):
    """A client's part of a store in this process."""

    def __init__(self, store: ResponseStore, client: str) -> None:
        self._store, self._client = store, client

    @property
    def is_open(self) -> bool:
        return self._store.limits.most > 0

    def conversation(self, response_id: str) -> list[Item]:
        found = self._store.find(self._client, response_id)
        if found is None:
            raise not_continued(response_id)
        return [json.loads(item.text) for item in (*found.said, *found.output)]

    def item(self, item_id: str) -> Item:
        found = self._store.find_item(self._client, item_id)
        if found is None:
            raise no_item(item_id)
        return json.loads(found.text)

    def keep(self, response: Item, said: Sequence[Item]) -> bool:
        return self._store.add(self._client, response, said)

    def response(self, response_id: str) -> Any:
        """A stored response."""
        return json.loads(self._found(response_id).text)

    def said(self, response_id: str) -> list[Item]:
        """The items that a stored response answers."""
        return [json.loads(item.text) for item in self._found(response_id).said]

    def forget(self, response_id: str) -> None:
        self._found(response_id)
        self._store.remove(self._client, response_id)

    def _found(self, response_id: str) -> _Response:
        found = self._store.find(self._client, response_id)
        if found is None:
            raise ApiError(
                404, f"response {_short(response_id)!r} is not stored here{_GONE}; use the id of another", param="response_id"
            )
        return found


def fits(response: Item, said: Sequence[Item], most_bytes: int) -> bool:
    """Whether a store of ``most_bytes`` can hold a response and its conversation."""
    try:
        total = sum(_OVERHEAD + len(json_text(one).encode()) for one in (response, *response["output"], *said))
        return total <= min(most_bytes, _LONGEST)
    except RecursionError:  # brackets without end, in a field that nobody reads
        return False


def not_continued(response_id: str) -> ApiError:
    """The error for a request that continues a response which is not stored."""
    message = f"previous response {_short(response_id)!r} was not found{_GONE}; send the whole conversation as input"
    return ApiError(400, message, param="previous_response_id", code="previous_response_not_found")


def no_item(item_id: str) -> ApiError:
    message = f"item {_short(item_id)!r} was not found{_GONE}; send the item itself"
    return ApiError(400, message, param="input", code="item_not_found")


def _short(name: str) -> str:
    return name[:64]


_GONE = ": it was never stored, was deleted, is too old, or belongs to another key"
