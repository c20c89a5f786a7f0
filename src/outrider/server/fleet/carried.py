"""Stored responses of a fleet: the front door keeps them, and tells a replica what a request refers to.

So a conversation can continue on any replica, and outlives all of them. A replica sends a finished response back before the end
of its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from starlette.types import Message

from outrider.server.response_items import REFERENCE, Item
from outrider.server.response_store import Shelf, fits, no_item, not_continued

KEPT = "outrider.kept"
"""Type of the message with a response to store."""
SHELF = "outrider.shelf"
"""Key of the shelf in a replica's scope."""


@dataclass(frozen=True)
class Carried:
    """The stored responses that a request refers to. Plain values, because they are sent to another process."""

    most_bytes: int = 0
    """Bytes of the front door's store; 0 if it stores nothing."""
    previous: tuple[str, Sequence[Item]] | None = None
    """The response that the request continues, and its conversation."""
    items: Mapping[str, Item] = field(default_factory=dict)

    @staticmethod
    def of(body: bytes, shelf: Shelf, most_bytes: int) -> Carried:
        """Look up what a body refers to. A body that cannot be read is refused by the replica, with a reason."""
        if not shelf.is_open:
            return NOTHING
        asked = _refers(body)
        previous, given = asked.get("previous_response_id"), asked.get("input")
        named = [item.get("id") for item in given if _is_reference(item)] if isinstance(given, list) else []
        items = {name: shelf.item(name) for name in named if isinstance(name, str)}
        return Carried(most_bytes, (previous, shelf.conversation(previous)) if isinstance(previous, str) else None, items)


def _refers(body: bytes) -> dict[str, Any]:
    """The body, if it can refer to something stored."""
    if b"previous_response_id" not in body and REFERENCE.encode() not in body:
        return {}
    try:
        asked = json.loads(body)
    except ValueError:
        return {}
    return asked if isinstance(asked, dict) else {}


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == REFERENCE


NOTHING = Carried()
"""The value for a request that refers to nothing, from a front door that stores nothing."""


@final
class CarriedShelf(Shelf):
    """The shelf as a replica sees it: what was carried, and the way back."""

    def __init__(self, carried: Carried, tell: Callable[[Message], None]) -> None:
        """``tell`` sends a message to the front door, in order with those of the answer."""
        self._carried, self._tell = carried, tell

    @property
    def is_open(self) -> bool:
        return self._carried.most_bytes > 0

    def conversation(self, response_id: str) -> list[Item]:
        previous = self._carried.previous
        if previous is None or previous[0] != response_id:
            raise not_continued(response_id)
        return list(previous[1])

    def item(self, item_id: str) -> Item:
        if item_id not in self._carried.items:
            raise no_item(item_id)
        return self._carried.items[item_id]

    def keep(self, response: Item, said: Sequence[Item]) -> bool:
        if not fits(response, said, self._carried.most_bytes):
            return False
        self._tell({"type": KEPT, "response": response, "said": list(said)})
        return True
