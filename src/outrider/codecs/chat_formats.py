"""Parsers for the formats in which chat models write tool calls and thinking. They work while the text is generated.

    Hermes, Qwen     <think>...</think> <tool_call>{"name": ..., "arguments": {...}}</tool_call>
                     or <tool_call><function=NAME><parameter=KEY>...</parameter></function></tool_call> (``tagged_calls.py``)
    Llama 3          {"name": ..., "parameters": {...}}; {...}                             the whole answer, or none of it
    Mistral          [TOOL_CALLS] [{"name": ..., "arguments": {...}}]   or   [TOOL_CALLS]name[ARGS]{...}
    gpt-oss          <|channel|>analysis<|message|>...<|end|> <|channel|>commentary to=functions.NAME<|message|>{...}<|call|>

The chat template tells the format. Text that could be the beginning of a marker is held back, so nothing that was shown is
taken back.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, final

from outrider.codecs.json_calls import JsonCalls, Meaning, Piece
from outrider.codecs.tagged_calls import AnyCalls


class Reader(ABC):
    """Reads one answer."""

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """The pieces of a further part of the text."""

    @abstractmethod
    def end(self) -> list[Piece]:
        """The pieces held back, now that the text has ended."""


@dataclass(frozen=True)
class ChatFormat:
    """A chat format and its parser."""

    name: str
    new_reader: Callable[[Mapping[str, Any]], Reader]
    """Makes a reader. It is given the tools that may be called, with the schemas of their arguments, or none if no calls are
    wanted."""
    shows_special: bool = False
    """Whether its markers are special tokens, which must stay in the text."""


@final
class BareCalls(Reader):
    """Reads calls that are bare JSON objects, which a grammar produces for an answer that must call a tool."""

    def __init__(self) -> None:
        self._calls = JsonCalls()

    def push(self, text: str) -> list[Piece]:
        return self._calls.push(text)

    def end(self) -> list[Piece]:
        return self._calls.end()


@final
class TaggedReader(Reader):
    """Content with ``<think>`` and ``<tool_call>`` stretches."""

    def __init__(self, tools: Mapping[str, Any], *, thinks: bool = False) -> None:
        """``thinks``: the prompt ended with an open ``<think>``."""
        self._opens = {"<think>": "</think>", **({"<tool_call>": "</tool_call>"} if tools else {})}
        self._close = "</think>" if thinks else ""
        self._tools, self._held, self._calls = tools, "", AnyCalls(tools)
        self._strip = True

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while True:
            markers = [self._close] if self._close else list(self._opens)
            place, marker = _first(self._held, markers)
            if marker is None:
                cut = len(self._held) - _num_open(self._held, markers)
                pieces += self._said(self._held[:cut])
                self._held = self._held[cut:]
                return pieces
            pieces += self._said(self._held[:place])
            self._held = self._held[place + len(marker) :]
            pieces += self._calls.end() if marker == "</tool_call>" else []
            self._close = "" if self._close else self._opens[marker]
            self._calls, self._strip = AnyCalls(self._tools), True

    def end(self) -> list[Piece]:
        rest, self._held = self._held, ""
        return [*self._said(rest), *(self._calls.end() if self._close == "</tool_call>" else [])]

    def _said(self, text: str) -> list[Piece]:
        if self._close == "</tool_call>":
            return self._calls.push(text)
        text = text.lstrip() if self._strip and (self._close or self._opens) and not text.strip() else text
        if not text:
            return []
        text = text.lstrip("\n") if self._strip else text
        self._strip = False
        return [Piece(Meaning.REASONING if self._close == "</think>" else Meaning.CONTENT, text)] if text else []


@final
class WholeCallReader(Reader):
    """Llama 3: an answer that begins with an object consists of calls; any other answer is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""
        self._calls: JsonCalls | None = None
        self._is_content = not names

    def push(self, text: str) -> list[Piece]:
        if self._is_content:
            return [Piece(Meaning.CONTENT, text)] if text else []
        if self._calls is not None:
            return self._checked(self._calls.push(text))
        self._held += text
        begun = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        if not begun or "<|python_tag|>".startswith(begun):
            return []
        if not begun.startswith("{"):
            self._is_content = True
            return [Piece(Meaning.CONTENT, self._held)]
        self._calls = JsonCalls()
        return self._checked(self._calls.push(begun))

    def _checked(self, pieces: list[Piece]) -> list[Piece]:
        """Calls of unknown tools become content: the model wrote JSON, but no call."""
        if any(piece.meaning is Meaning.CALL and piece.text not in self._names for piece in pieces):
            self._is_content = True
            return [Piece(Meaning.CONTENT, "".join(piece.text for piece in pieces))]
        return pieces

    def end(self) -> list[Piece]:
        if self._calls is not None:
            return self._calls.end()
        return [Piece(Meaning.CONTENT, self._held)] if self._held and not self._is_content else []


@final
class MistralReader(Reader):
    """Content, then after [TOOL_CALLS] an array of calls, or names followed by their arguments."""

    _MARKER = "[TOOL_CALLS]"

    def __init__(self, names: Collection[str]) -> None:
        self._markers = [self._MARKER] if names else []
        self._held, self._calls = "", JsonCalls()
        self._is_calling = self._is_named = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while not self._is_calling:
            place, marker = _first(self._held, self._markers)
            cut = place if marker else len(self._held) - _num_open(self._held, self._markers)
            pieces += [Piece(Meaning.CONTENT, self._held[:cut])] if cut else []
            self._held = self._held[cut + len(marker or "") :]
            self._is_calling = marker is not None
            if not marker:
                return pieces
        return pieces + self._called()

    def _called(self) -> list[Piece]:
        if not self._calls.depth:
            found = re.match(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.\-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)", self._held)
            self._is_named = found is not None
            if found:
                self._held = f'{{"name": "{found[1]}", "arguments": {self._held[found.end() :]}'
            elif self._MARKER.startswith(self._held.strip()) or self._without_marker()[:1] not in ("[", "{", ",", ";"):
                return []  # a name that is not whole, or another marker
        text, self._held = self._held, ""
        return self._arguments_of_name(text) if self._is_named else self._calls.push(text)

    def _without_marker(self) -> str:
        return self._held.lstrip().removeprefix(self._MARKER).lstrip()

    def _arguments_of_name(self, text: str) -> list[Piece]:
        """Ends the arguments where the object around them closes."""
        pieces: list[Piece] = []
        for place, letter in enumerate(text):
            pieces += self._calls.push(letter)
            if self._calls.depth == 1 and letter == "}":
                pieces += self._calls.push("}")
                self._held = text[place + 1 :]
                return pieces + (self._called() if self._held else [])
        return pieces

    def end(self) -> list[Piece]:
        rest, self._held = self._held, ""
        if self._is_calling:
            return self._calls.end()
        return [Piece(Meaning.CONTENT, rest)] if rest else []


@final
class HarmonyReader(Reader):
    """gpt-oss: messages with a channel each. ``analysis`` is thinking, ``to=functions.NAME`` a call, the rest content."""

    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""
        self._meaning: Meaning | None = None
        """Meaning of the message that is open; None in a header."""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while True:
            markers = ["<|message|>"] if self._meaning is None else list(self._ENDS)
            place, marker = _first(self._held, markers)
            if marker is None:
                return pieces + self._open_text(markers)
            before, self._held = self._held[:place], self._held[place + len(marker) :]
            pieces += self._begun(before) if self._meaning is None else self._said(before)
            if marker != "<|message|>":
                self._meaning = None
                self._held = marker + self._held if marker == "<|channel|>" else self._held

    def _open_text(self, markers: Collection[str]) -> list[Piece]:
        if self._meaning is None:
            return []
        cut = len(self._held) - _num_open(self._held, markers)
        said, self._held = self._held[:cut], self._held[cut:]
        return self._said(said)

    def _begun(self, header: str) -> list[Piece]:
        called = re.search(r"to=functions\.([\w.\-]+)", header)
        if called and self._names:
            self._meaning = Meaning.ARGUMENTS
            return [Piece(Meaning.CALL, called[1])]
        self._meaning = Meaning.REASONING if "<|channel|>analysis" in header else Meaning.CONTENT
        return []

    def _said(self, text: str) -> list[Piece]:
        return [Piece(self._meaning, text)] if text and self._meaning else []

    def end(self) -> list[Piece]:
        rest, self._held = self._held, ""
        if self._meaning is None:  # no message ever began: a model that does not keep to its format
            return [Piece(Meaning.CONTENT, rest)] if rest and "<|" not in rest else []
        return self._said(rest)


TAGGED = ChatFormat("hermes", TaggedReader)
FORMATS = (
    ("<|channel|>", ChatFormat("harmony", HarmonyReader, shows_special=True)),
    ("[TOOL_CALLS]", ChatFormat("mistral", MistralReader, shows_special=True)),
    ("<tool_call>", TAGGED),
    ("<|python_tag|>", ChatFormat("llama3", WholeCallReader)),
    ("<|start_header_id|>", ChatFormat("llama3", WholeCallReader)),
    ("<think>", TAGGED),
)


def format_of(template: str | None) -> ChatFormat | None:
    """The format of a chat template; None for one without tools and thinking."""
    return next((known for marker, known in FORMATS if marker in (template or "")), None)


def _first(text: str, markers: Collection[str]) -> tuple[int, str | None]:
    """The position of the earliest marker, and the marker."""
    found = [(text.find(marker), marker) for marker in markers if marker in text]
    return min(found) if found else (len(text), None)


def _num_open(text: str, markers: Collection[str]) -> int:
    """Length of the longest suffix of the text that begins a marker."""
    ends = (size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size]))
    return max(ends, default=0)
