"""Items of /v1/responses: as they are stored and listed, and as messages of the chat API."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from outrider.core.errors import nearest
from outrider.server.failures import ApiError
from outrider.server.messages import has_images, joined_text

Item = dict[str, Any]
MOST_ITEMS = 2048
"""Most items of a conversation. A short request that continues it makes the server read them all."""
REFERENCE = "item_reference"
"""Kind of an item that names a stored one by its id."""
_KINDS = ("message", "reasoning", "function_call", "function_call_output", REFERENCE)
"""Types of items that are understood."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """The items of a request's ``input``, each with a type, an id, and its content in parts."""
    return [_whole({"role": "user", "content": given})] if isinstance(given, str) else [_whole(item) for item in given]


def _whole(item: Item) -> Item:
    kind = item.get("type") or "message"
    given = item.get("id")
    prefix = _PREFIXES.get(kind, "item") if isinstance(kind, str) else "item"
    whole = {**item, "id": given if isinstance(given, str) and given else f"{prefix}_{uuid.uuid4().hex}", "type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        whole |= {"content": [{"type": part, "text": item["content"]}]}
    return whole


def said_in(items: Sequence[Item]) -> list[Item]:
    """Output items as they continue a conversation: without log-probabilities."""
    return [{**item, "content": [_plain(part) for part in item["content"]]} if item.get("content") else item for item in items]


def _plain(part: Item) -> Item:
    return {name: value for name, value in part.items() if name != "logprobs"}


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a conversation. Reasoning and calls of one turn are one message."""
    said: list[dict[str, Any]] = []
    for item in items:
        message = _message(item)
        if said and _belongs_to(said[-1], message):
            said[-1] = _one_turn(said[-1], message)
        else:
            said.append(message)
    return said


def _message(item: Item) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _reasoning(item)}
    if kind == "function_call":
        function = {"name": str(item.get("name", "")), "arguments": str(item.get("arguments", "{}"))}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output", "")
        text = output if isinstance(output, str) else joined_text(_parts(output), "input")
        return {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text}
    if kind != "message":
        message = f"input holds an item of type {str(kind)[:64]!r}; {nearest(str(kind), _KINDS)}"
        raise ApiError(400, message, param="input")
    content = item.get("content", "")
    text = content if isinstance(content, str) or has_images(_parts(content)) else joined_text(_parts(content), "input")
    return {"role": item.get("role", "user"), "content": text}


def _reasoning(item: Item) -> str:
    """The thinking of an earlier turn, which templates may show to the model again."""
    parts = item.get("content") or []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ""


def _belongs_to(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether both belong to one turn: thinking comes before text and calls, and calls may come with text."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    is_thought = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
    return is_thought or "tool_calls" in message


def _one_turn(last: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
    content = last["content"] or message["content"]
    return {**last, **message, "content": content, **({"tool_calls": calls} if calls else {})}


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError(400, "the content of an item of input is not valid; send a text or a list of parts", param="input")
    return content
