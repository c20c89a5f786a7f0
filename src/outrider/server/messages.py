"""Messages of a conversation in the form that chat templates take: content as one text, tool calls of earlier turns as objects.

The content of a message with images stays in parts, and each image is the bytes of its data URL. Other addresses are not read,
so a request can never open a file or a connection of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.errors import RequestError
from outrider.server.failures import ApiError
from outrider.server.protocol import ChatMessage
from outrider.vision.messages import data_of

IMAGE_PARTS = ("image_url", "input_image")
"""Kinds of parts that hold an image, of the chat API and of the Responses API."""
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts that hold text, with the field that has it."""


def has_images(content: str | Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether any part of the content is an image."""
    return not isinstance(content, str) and any(part.get("type") in IMAGE_PARTS for part in content or ())


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """Content as one text: parts are joined, and None becomes empty. Content with images stays in parts."""
    content = message.content or ""
    said = _with_images(content) if has_images(content) and not isinstance(content, str) else joined_text(content, "messages")
    plain = {**message.model_dump(exclude_none=True), "content": said}
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
    texts = [part.get(_TEXT_FIELDS[kind]) for part in content if (kind := str(part.get("type"))) in _TEXT_FIELDS]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"only text parts are supported in {param}; send parts of type 'text'", param=param)
    return "".join(str(text) for text in texts)


def _with_images(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_image(part) if part.get("type") in IMAGE_PARTS else _text(part) for part in content]


def _text(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": joined_text([part], "messages")}


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        example = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise ApiError(400, f"an image part has no image_url; send {example}", param="messages")
    try:
        return {"type": "image", "image": data_of(url)}
    except RequestError as error:
        raise ApiError(400, str(error), param="messages") from None


def _with_object(call: Any) -> Any:
    """A tool call with its arguments as an object, because templates render them as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError):  # brackets without end are no JSON either
        return call
