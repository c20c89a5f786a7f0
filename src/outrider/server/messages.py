"""Messages of a conversation as a chat template takes them: content as one text, calls of earlier turns as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.server.failures import ApiError
from outrider.server.protocol import ChatMessage


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """Content as one text: parts are joined, none is empty."""
    plain = {**message.model_dump(exclude_none=True), "content": joined_text(message.content or "", "messages")}
    if plain["role"] == "function":  # the older name of a tool's answer
        plain["role"] = "tool"
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    return plain


def joined_text(content: str | Sequence[Mapping[str, Any]], param: str) -> str:
    """The text of content that may come in parts."""
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content if part.get("type") in ("text", "input_text", "output_text")]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"only text parts are understood in {param}; send parts of type 'text'", param=param)
    return "".join(str(text) for text in texts)


def _with_object(call: Any) -> Any:
    """Arguments as an object: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError:
        return call
