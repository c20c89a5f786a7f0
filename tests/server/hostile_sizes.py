"""Requests that are large where nobody looks: names of megabytes, objects of thousands of keys, brackets inside strings."""

from __future__ import annotations

import json
from typing import Any

_SAID = {"role": "user", "content": "Hi"}
_TOOL = {"type": "function", "function": {"name": "f"}}
_NAME = "a" * 3_900_000
"""A name as long as a body may be. Finding the most similar of a few names would take minutes."""

Made = tuple[str, str, Any, tuple[int, ...]]


def made_cases() -> list[Made]:
    """Name, path, body, and the answers that are in order."""
    return [*_names(), *_counts(), *_conversations()]


def _complete(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 1, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [_SAID], "max_tokens": 1, **fields}


def _names() -> list[Made]:
    named = {"type": "function", "function": {"name": _NAME}}
    bodies: dict[str, tuple[str, Any, int]] = {
        "model": ("completions", _complete(model=_NAME), 404),
        "method": ("completions", _complete(speculation={"method": _NAME}), 400),
        "field": ("completions", _complete(**{_NAME: 1}), 400),
        "tool that is chosen": ("chat/completions", _chat(tools=[_TOOL], tool_choice=named), 400),
        "function that is called": ("chat/completions", _chat(functions=[{"name": "f"}], function_call={"name": _NAME}), 400),
        "allowed tool": (
            "chat/completions",
            _chat(tools=[_TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {"tools": [named]}}),
            400,
        ),
        "response of before": ("responses", {"input": "x", "previous_response_id": _NAME}, 400),
    }
    return [(f"a name of megabytes: {name}", f"/v1/{path}", body, (code,)) for name, (path, body, code) in bodies.items()]


def _counts() -> list[Made]:
    keys = {f"k{i}": 1 for i in range(250_000)}
    few = {f"k{i}": 1 for i in range(20_000)}
    properties = {name: {"type": "string"} for name in few}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    spaced = json.dumps({"prompt": "Once", "metadata": keys}).replace('":', '" :').encode()
    return [
        ("keys: a quarter of a million fields", "/v1/completions", _complete(**keys), (413,)),
        ("keys: a quarter of a million, hidden", "/v1/completions", spaced, (413,)),
        ("keys: twenty thousand fields", "/v1/completions", _complete(**few), (400,)),
        ("keys: twenty thousand in metadata", "/v1/completions", _complete(metadata=few), (200,)),
        ("keys: a tool of ten thousand", "/v1/chat/completions", _chat(tools=[tool]), (413,)),
        ("roles: thousands that are none", "/v1/chat/completions", _chat(messages=[{"role": "x"}] * 16_000), (400,)),
        ("tokens: a quarter of a million to read", "/detokenize", {"tokens": [5] * 250_000}, (400,)),
        ("tokens: a quarter of a million that are none", "/detokenize", {"tokens": ["x"] * 250_000}, (400,)),
    ]


def _conversations() -> list[Made]:
    def called(arguments: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return _chat(messages=[_SAID, {"role": "assistant", "tool_calls": [call]}, _SAID])

    item = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    part = {"type": "input_text", "text": "x"}
    return [
        ("calls: brackets without end", "/v1/chat/completions", called("[" * 1_000_000), (200, 400)),
        ("calls: a list of thousands", "/v1/chat/completions", called(json.dumps(list(range(100_000)))), (200, 400)),
        ("calls: two kinds of tools", "/v1/chat/completions", _chat(tools=[_TOOL], functions=[{"name": "f"}]), (400,)),
        ("continue: what no template shows", "/v1/chat/completions", _chat(continue_final_message=True), (200, 400)),
        (
            "continue: and open a turn",
            "/v1/chat/completions",
            _chat(continue_final_message=True, add_generation_prompt=True),
            (400,),
        ),
        ("responses: thousands of calls", "/v1/responses", {"input": [item] * 8000}, (400,)),
        ("responses: thousands of parts", "/v1/responses", {"input": [{"role": "user", "content": [part] * 15_000}]}, (400,)),
        ("documents: megabytes", "/v1/chat/completions", _chat(documents=[{"text": "y" * 3_000_000}]), (200, 400)),
    ]
