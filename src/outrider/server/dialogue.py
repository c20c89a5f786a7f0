"""What a request of /v1/responses answers: the stored conversation that it continues, and its own input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from outrider.server.failures import ApiError
from outrider.server.response_items import MOST_ITEMS, REFERENCE, Item, items_of
from outrider.server.response_store import Shelf
from outrider.server.responses_protocol import ResponsesRequest


@final
@dataclass(frozen=True)
class Dialogue:
    """The items that a request answers, and the place where its response is stored."""

    items: Sequence[Item]
    shelf: Shelf
    is_kept: bool
    """Whether the response is to be stored."""

    @staticmethod
    def of(asked: ResponsesRequest, shelf: Shelf) -> Dialogue:
        """Look up what a request refers to. Refused if it is not there, or if nothing is stored here."""
        if not shelf.is_open:
            _check_closed(asked)
        earlier = [] if asked.previous_response_id is None else shelf.conversation(asked.previous_response_id)
        given = asked.input if isinstance(asked.input, str) else [_looked_up(item, shelf) for item in asked.input]
        items = [*earlier, *items_of(given)]
        if len(items) > MOST_ITEMS:
            message = f"the conversation has {len(items)} items; at most {MOST_ITEMS} are taken; start a new one"
            raise ApiError(400, message, param="previous_response_id")
        return Dialogue(items, shelf, shelf.is_open and asked.store is not False)

    def keep(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """Store a response if that was asked for. Returns it as it is told, with whether it was stored."""
        told = {**response, "store": self.is_kept}
        is_kept = self.is_kept and self.shelf.keep(told, self.items)
        return {**told, "store": is_kept}


def _check_closed(asked: ResponsesRequest) -> None:
    refers = not isinstance(asked.input, str) and any(item.get("type") == REFERENCE for item in asked.input)
    for name, is_used in (("store", asked.store), ("previous_response_id", asked.previous_response_id), ("input", refers)):
        if is_used:
            message = f"{name} needs stored responses, and this server stores none (--stored-responses 0)"
            raise ApiError(400, f"{message}; send the whole conversation as input", param=name)


def _looked_up(item: Item, shelf: Shelf) -> Item:
    if item.get("type") != REFERENCE:
        return item
    return shelf.item(str(item.get("id", "")))
