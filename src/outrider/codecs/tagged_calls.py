"""Parses calls whose arguments are written between tags, while they are generated. Values become JSON.

    Qwen3-Coder      <function=weather><parameter=city>Oslo</parameter></function>
    GLM-4.5          weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>

A value is the text between its tags. Whether 12 is a number or a text is told by the tool's schema alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, final

from outrider.codecs.json_calls import JsonCalls, Meaning, Piece

_NAME = re.compile(r"\s*(?:<function=([^>\s]+)>|([\w.\-]+)\s*(?=[\n<]))")
_VALUE = re.compile(
    r"\s*(?:<parameter=([^>]+)>\n?(.*?)\n?</parameter>|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>)", re.DOTALL
)


@final
class TaggedCalls:
    """Reads one call."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        """``tools``: names of the tools with the schemas of their arguments."""
        self._tools, self._held = tools, ""
        self._name: str | None = None
        self._num_values = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._read() if ">" in text or "\n" in text else []

    def end(self) -> list[Piece]:
        """The rest of the call. Text that did not become a call is content."""
        self._held += "\n"  # ends a name without arguments
        pieces = self._read()
        if self._name is None:
            return [Piece(Meaning.CONTENT, self._held[:-1])] if self._held.strip() else []
        return [*pieces, Piece(Meaning.ARGUMENTS, "}" if self._num_values else "{}")]

    def _read(self) -> list[Piece]:
        """The name once it is complete, and each value once it is complete."""
        pieces: list[Piece] = []
        if self._name is None:
            found = _NAME.match(self._held)
            if found is None:
                return []
            self._name, self._held = str(found[1] or found[2]), self._held[found.end() :]
            pieces.append(Piece(Meaning.CALL, self._name))
        while (found := _VALUE.match(self._held)) is not None:
            key, value = (found[1], found[2]) if found[1] is not None else (found[3], found[4])
            self._held = self._held[found.end() :]
            written = f"{json.dumps(key.strip(), ensure_ascii=False)}: {self._as_json(key.strip(), value)}"
            pieces.append(Piece(Meaning.ARGUMENTS, (", " if self._num_values else "{") + written))
            self._num_values += 1
        return pieces

    def _as_json(self, key: str, value: str) -> str:
        """The value as JSON: a string, unless the schema asks for another type and the value has that type."""
        schema = (self._tools.get(self._name or "") or {}).get("properties", {}).get(key, {})
        if not _takes_text(schema):
            try:
                return json.dumps(json.loads(value), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(value, ensure_ascii=False)


@final
class AnyCalls:
    """Reads calls between two tags. The first letter tells whether a call is JSON or has tags of its own."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = tools
        self._calls: JsonCalls | TaggedCalls | None = None

    def push(self, text: str) -> list[Piece]:
        if self._calls is None:
            text = text.lstrip()
            if not text:
                return []
            self._calls = JsonCalls() if text[0] in "{[" else TaggedCalls(self._tools)
        return self._calls.push(text)

    def end(self) -> list[Piece]:
        return [] if self._calls is None else self._calls.end()


def _takes_text(schema: Any) -> bool:
    """Whether a schema accepts a string. A schema that does not say accepts one."""
    if not isinstance(schema, Mapping):
        return True
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type") or []
    if kinds:
        return "string" in kinds
    branches = schema.get("anyOf") or schema.get("oneOf") or []
    return any(map(_takes_text, branches)) if branches else not {"items", "properties"} & set(schema)
