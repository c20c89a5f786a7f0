"""Sources of grammars: JSON schemas, regular expressions, EBNF and lists of choices, in the matcher's own notation.

Nothing is compiled here. A source is a value that can be measured, refused by its size or depth, and used as a key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import OptionError

_HEADER = '%llguidance {"no_forcing": true}\n'
"""An option of the library. Where only one text can follow, it would allow only the tokenizer's own first token of that text.
That is not the target's law under the grammar, so all tokens that begin the text are allowed."""


@dataclass(frozen=True)
class GrammarSource:
    """A grammar before it is compiled."""

    text: str
    noun: str
    """The user's word for it, for errors."""


class GrammarTooLargeError(OptionError):
    """A grammar is longer than the limit."""


class GrammarTooDeepError(OptionError):
    """A grammar is nested deeper than the limit."""


@dataclass(frozen=True)
class SourceLimits:
    """How large a grammar may be."""

    max_bytes: int = 131_072
    max_depth: int = 64
    """Levels of objects and arrays in a JSON schema, of parentheses in a regular expression or EBNF text."""

    def check_text(self, text: str, noun: str) -> None:
        """Refuse a regular expression or EBNF text that is too long or nested too deep."""
        self._check_bytes(len(text.encode("utf-8", "surrogatepass")), noun)
        depth = deepest = 0
        for letter in text:
            depth += (letter in "([{") - (letter in ")]}")
            deepest = max(deepest, depth)
        self._check_depth(deepest, noun)

    def check_schema(self, schema: Any) -> None:
        """Refuse a JSON schema that is too long or nested too deep."""
        self._check_depth(depth_of(schema, self.max_depth + 1), "JSON schema")
        self._check_bytes(len(json.dumps(schema)), "JSON schema")

    def _check_bytes(self, size: int, noun: str) -> None:
        if size > self.max_bytes:
            raise GrammarTooLargeError(f"the {noun} has {size} bytes and at most {self.max_bytes} are taken; make it smaller")

    def _check_depth(self, depth: int, noun: str) -> None:
        if depth > self.max_depth:
            message = f"the {noun} is nested deeper than {self.max_depth} levels; make it flatter, or refer to parts with $ref"
            raise GrammarTooDeepError(message)


def depth_of(value: Any, limit: int) -> int:
    """Levels of dictionaries and lists in parsed JSON, counted up to ``limit`` and without recursion."""
    level, depth = [value], 0
    while level and depth < limit:
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
        depth += bool(inner)
    return depth


def json_schema_source(schema: Mapping[str, Any] | str, *, whitespace: bool = False) -> GrammarSource:
    """JSON that validates, spaced as ``json.dumps`` does; ``whitespace`` allows any. ``{}`` is any JSON."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
    except ValueError as error:
        raise OptionError(f"the JSON schema is not valid JSON ({error}); correct it") from None
    if not isinstance(parsed, dict):
        raise OptionError(f"the JSON schema is {parsed!r} and must be an object; correct it")
    own = parsed.get("x-guidance", {})
    if not isinstance(own, dict):
        raise OptionError(f"x-guidance is {own!r} and must be an object; leave it out")
    # Free whitespace is a trap: a small model that likes line breaks never gets out of it.
    spacing = {} if whitespace else {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    named = {"name": "schema", "json_schema": {**parsed, "x-guidance": {**own, **spacing}}}
    return GrammarSource(json.dumps({"grammars": [{"lark_grammar": f"{_HEADER}start: @schema"}, named]}), "JSON schema")


def regex_source(pattern: str) -> GrammarSource:
    """Text that matches the whole pattern (no look-around and no back-references: they are not regular)."""
    from llguidance import regex_to_lark

    return GrammarSource(f"{_HEADER}start: /{regex_to_lark(pattern)}/", "regular expression")


def ebnf_source(grammar: str) -> GrammarSource:
    """Text of a context-free grammar: rules ``start: ...`` in Lark's notation, or ``root ::= ...`` in GBNF's."""
    from llguidance import grammar_from

    try:
        source = grammar_from("gbnf" if "::=" in grammar else "lark", grammar)
    except ValueError as error:
        raise OptionError(f"the grammar cannot be read ({first_line(str(error))}); correct it") from None
    return GrammarSource(source if "%llguidance" in source else _HEADER + source, "grammar")


def choice_source(choices: Sequence[str]) -> GrammarSource:
    """One of a few texts."""
    if not choices or not all(choices):
        raise OptionError("a choice needs at least one text, and none of them empty; correct the list")
    return GrammarSource(f"{_HEADER}start: {' | '.join(json.dumps(choice) for choice in choices)}", "choice")


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")
