"""Parses function calls in JSON while they are generated: first the name, then the arguments piece by piece.

    {"name": "weather", "arguments": {"city": "Oslo"}}      one object per call; commas, semicolons and brackets between them

Models write the arguments under "arguments" or "parameters", after the name or before it, as an object or as a string that
holds one. The parsed arguments are always the text of an object.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import final


class Meaning(Enum):
    """The meaning of a stretch of a model's text."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"
    """The name of a function: a call begins."""
    ARGUMENTS = "arguments"
    """A further part of the current call's arguments."""


@dataclass(frozen=True)
class Piece:
    """A stretch of text with its meaning."""

    meaning: Meaning
    text: str


_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", "function", *_ARGUMENTS)


@final
class JsonCalls:
    """Parses tool calls. Text that turns out to be something else is returned as content."""

    def __init__(self) -> None:
        self.is_foreign = False
        """Whether the first key of an object cannot belong to a call. The object is then content, and so is everything after
        it."""
        self.depth = 0
        self._raw = ""
        self._reset()

    def _reset(self) -> None:
        self._in_string = self._escaped = False
        self._string, self._key, self._name = "", "", ""
        self._value, self._told_name, self._num_told = "", False, 0
        self._raw = ""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for place, letter in enumerate(text):
            if self.is_foreign:
                return [*pieces, Piece(Meaning.CONTENT, text[place:])]
            if self.depth == 0 and letter != "{":
                continue  # between two calls
            self._raw += letter
            self._letter(letter)
            if self.is_foreign:
                pieces.append(Piece(Meaning.CONTENT, self._raw))
            elif self.depth == 0:
                pieces += self._told(is_whole=True)
                self._reset()
        return pieces if self.is_foreign else pieces + self._told(is_whole=False)

    def end(self) -> list[Piece]:
        """The text that was held back, if the answer ended inside a call without a known name."""
        return [Piece(Meaning.CONTENT, self._raw)] if self._raw and not self._told_name and not self.is_foreign else []

    def _letter(self, letter: str) -> None:
        inside = self.depth > 1 or (self.depth == 1 and self._key in _ARGUMENTS)
        if self._in_string:
            self._value += letter if inside else ""
            self._continue_string(letter)
            return
        if letter in "{[":
            self.depth += 1
        elif letter in "}]":
            self.depth -= 1
        if inside and not (self.depth == 0 or (self.depth == 1 and letter == ",")):
            self._value += letter if self._key in _ARGUMENTS else ""
        if letter == '"':
            self._in_string, self._string = True, ""
        elif letter == ":" and self.depth == 1:
            self._key = self._string
            self.is_foreign = self.is_foreign or self._key not in _KEYS
        elif letter == "," and self.depth == 1:
            self._end_value()

    def _continue_string(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._in_string = False
            if self.depth == 1 and self._key == "name" and not self._name:
                self._name = _unquoted(f'"{self._string}"')
            return
        self._string += letter

    def _end_value(self) -> None:
        self._key = "" if self._key not in _ARGUMENTS else "told"

    def _told(self, *, is_whole: bool) -> list[Piece]:
        """The name once it is known, and the new part of the arguments."""
        pieces: list[Piece] = []
        if self._name and not self._told_name:
            self._told_name = True
            pieces.append(Piece(Meaning.CALL, self._name))
        if not self._told_name:
            return [Piece(Meaning.CONTENT, self._raw)] if is_whole else []
        value = self._value.strip()
        if value.startswith('"'):  # an object written as a string is told when it is whole
            value = _unquoted(value) if is_whole else ""
        elif is_whole and not value:
            value = "{}"
        if len(value) > self._num_told:
            pieces.append(Piece(Meaning.ARGUMENTS, value[self._num_told :]))
            self._num_told = len(value)
        return pieces


def _unquoted(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    return value if isinstance(value, str) else json.dumps(value)
