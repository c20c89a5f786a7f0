"""JSON that can always be sent: half of a surrogate pair, which JSON allows and UTF-8 does not, is written as an escape."""

from __future__ import annotations

import json
from typing import Any, final

from fastapi.responses import JSONResponse


def json_text(body: Any) -> str:
    """The body as JSON that is valid UTF-8."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(body, ensure_ascii=True, allow_nan=False)
    return text


@final
class JsonAnswer(JSONResponse):
    """An answer in JSON."""

    def render(self, content: Any) -> bytes:
        return json_text(content).encode("utf-8")
