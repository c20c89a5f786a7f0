"""Refusals in one sentence: for a body, the most informative validation error; for an unknown path, the nearest valid one.

A field that allows several types gets an error for each. The most informative one is about the type that was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from outrider.core.errors import closest
from outrider.server.failures import ApiError

_ANOTHER_KIND = ("_type", "literal_error", "_attributes_type")
"""Endings of the names of errors about a wrong type."""
_OUTSIDE = ("query", "path")
"""Places of parameters that are not in the body."""
_LONGEST = 64
"""Letters of a name that are quoted. A name may be as long as the body."""


def refusal_of(errors: Sequence[Mapping[str, Any]], body: Any, known: type[BaseModel] | None = None) -> ApiError:
    """The API error for what validation found. ``known`` is the model of the body, for the nearest name of a field."""
    worst = min(errors, key=lambda error: (str(error["type"]).endswith(_ANOTHER_KIND), -len(error["loc"])))
    where = ".".join(str(part)[:_LONGEST] for part in _path(worst, body))
    if worst["type"] == "extra_forbidden":
        hint = closest(where, known.model_fields) if known is not None else ""
        return ApiError(400, f"{where} is not a supported field; {hint}leave it out", param=where)
    said = str(worst["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{where or 'body'}: {said}", param=where or "body")


def no_route(method: str, path: str, known: Mapping[str, Collection[str]]) -> ApiError:
    """The API error for a path that is not there, or that takes other methods. ``known`` has the methods of each path."""
    if path in known:
        able = ", ".join(sorted(known[path]))
        return ApiError(405, f"{path} does not answer {method}; send {able}", headers={"Allow": able})
    hint = closest(path, known) or f"paths: {', '.join(sorted(known))}; "
    return ApiError(404, f"there is no path {path[:_LONGEST]!r} here; {hint}GET /openapi.json describes all of them")


def _path(error: Mapping[str, Any], body: Any) -> list[Any]:
    """Where in the body the error is, or which parameter of the address it is about. The names of types, which pydantic
    inserts, are left out."""
    if error["loc"][0] in _OUTSIDE:
        return list(error["loc"][1:])
    parts = [part for part in error["loc"] if part != "body"]
    found, value = list[Any](), body
    for place, part in enumerate(parts):
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if is_there:
            value = value[part]
        if is_there or (place == len(parts) - 1 and error["type"] == "missing"):
            found.append(part)
    return found
