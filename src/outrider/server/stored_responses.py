"""Routes of stored responses: /v1/responses/{id} to read or delete one, and the items that it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from outrider.server.failures import ApiError
from outrider.server.json_text import JsonAnswer
from outrider.server.response_items import Item
from outrider.server.response_store import OwnShelf

_MISSING: dict[int | str, dict[str, Any]] = {404: {"description": "no such response is stored"}}
_MOST_LISTED = 100


def add_stored(app: FastAPI, shelf_of: Callable[[HttpRequest], OwnShelf]) -> None:
    """Add the routes. ``shelf_of`` finds the stored responses of the client that asks."""

    @app.get("/v1/responses/{response_id}", responses=_MISSING)
    async def stored(response_id: str, http: HttpRequest, stream: bool = False) -> Response:
        found = shelf_of(http).response(response_id)
        if stream:
            raise ApiError(
                400, "only responses that run in the background can be streamed again; leave out stream", param="stream"
            )
        return JsonAnswer(found)

    @app.delete("/v1/responses/{response_id}", responses=_MISSING)
    async def delete(response_id: str, http: HttpRequest) -> dict[str, Any]:
        shelf_of(http).forget(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel", responses=_MISSING)
    async def cancel(response_id: str, http: HttpRequest) -> Response:
        shelf_of(http).response(response_id)
        raise ApiError(
            400, "only responses that run in the background can be cancelled, and this one is complete; use it as it is"
        )

    @app.get("/v1/responses/{response_id}/input_items", responses=_MISSING)
    async def input_items(
        response_id: str,
        http: HttpRequest,
        limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        before: str | None = None,
    ) -> Response:
        items = shelf_of(http).said(response_id)
        items = items if order == "asc" else items[::-1]
        items = items[_place(items, after, "after") + 1 :] if after else items
        items = items[: _place(items, before, "before")] if before else items
        page = items[:limit]
        told = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JsonAnswer({"object": "list", "data": page, **told, "has_more": len(items) > limit})


def _place(items: list[Item], item_id: str, param: str) -> int:
    """The place of an item in a list."""
    found = next((place for place, item in enumerate(items) if item["id"] == item_id), None)
    if found is None:
        raise ApiError(
            400, f"{param} names item {item_id[:64]!r}, which is not in this list; use the id of one that is", param=param
        )
    return found
