"""Calls and thinking in the formats of chat models, read whole and letter by letter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.codecs.chat_formats import (
    BareCalls,
    HarmonyReader,
    MistralReader,
    Reader,
    TaggedReader,
    WholeCallReader,
    format_of,
)
from outrider.codecs.json_calls import Meaning

_TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"anyOf": [{"type": "integer"}]}}},
    "add": {},
}
_OSLO = '{"city": "Oslo {\\"}"}'
Read = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, calls with their arguments."""

_CASES: dict[str, tuple[Reader, str, Read]] = {
    "hermes": (
        TaggedReader(_TOOLS),
        f'Let me see.<tool_call>\n{{"name": "weather", "arguments": {_OSLO}}}\n</tool_call>',
        ("Let me see.", "", [("weather", _OSLO)]),
    ),
    "hermes, two calls and a thought": (
        TaggedReader(_TOOLS),
        '<think>\nhm < 3</think>\n\n<tool_call>{"name": "add", "arguments": {"a": [1, {"b": 2}]}}</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "weather"}</tool_call>',
        ("", "hm < 3", [("add", '{"a": [1, {"b": 2}]}'), ("weather", "{}")]),
    ),
    "hermes, plain text": (TaggedReader(_TOOLS), "1 < 2 and <tool", ("1 < 2 and <tool", "", [])),
    "thinking from the start": (TaggedReader({}, thinks=True), "I think\n</think>\n\nYes.", ("Yes.", "I think\n", [])),
    "no tools, no calls": (TaggedReader({}), "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", "", [])),
    "qwen coder": (
        TaggedReader(_TOOLS),
        "Well.<tool_call>\n<function=weather>\n<parameter=city>\n12 <b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        ("Well.", "", [("weather", '{"city": "12 <b>", "days": 3}'), ("add", "{}")]),
    ),
    "glm": (
        TaggedReader(_TOOLS),
        "<think>hm</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[1</arg_value>\n</tool_call><tool_call>add</tool_call>",
        ("", "hm", [("weather", '{"city": "Oslo", "days": "[1"}'), ("add", "{}")]),
    ),
    "tags around what is no call": (TaggedReader(_TOOLS), "<tool_call>?!</tool_call>.", ("?!.", "", [])),
    "llama": (
        WholeCallReader(_TOOLS),
        f'<|python_tag|>{{"name": "weather", "parameters": {_OSLO}}}; {{"name": "add", "parameters": {{"a": 1}}}}',
        ("", "", [("weather", _OSLO), ("add", '{"a": 1}')]),
    ),
    "llama, text": (WholeCallReader(_TOOLS), "The weather is fine.", ("The weather is fine.", "", [])),
    "llama, JSON that is no call": (WholeCallReader(_TOOLS), '{"city": "Oslo"}', ('{"city": "Oslo"}', "", [])),
    "mistral, an array": (
        MistralReader(_TOOLS),
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_OSLO}}}, {{"name": "add", "arguments": "{{\\"a\\": 1}}"}}]',
        ("", "", [("weather", _OSLO), ("add", '{"a": 1}')]),
    ),
    "mistral, names": (
        MistralReader(_TOOLS),
        f'Well.[TOOL_CALLS]weather[ARGS]{_OSLO}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{{"a": 1}}',
        ("Well.", "", [("weather", _OSLO), ("add", '{"a": 1}')]),
    ),
    "harmony": (
        HarmonyReader(_TOOLS),
        "<|channel|>analysis<|message|>Need a look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{_OSLO}<|call|>",
        ("", "Need a look.", [("weather", _OSLO)]),
    ),
    "harmony, final": (
        HarmonyReader(()),
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ("Yes.", "Easy.", []),
    ),
    "bare": (BareCalls(), '{"name": "add", "arguments": {"a": 1}}', ("", "", [("add", '{"a": 1}')])),
    "cut inside the arguments": (BareCalls(), '{"name": "add", "arguments": {"a": 1', ("", "", [("add", '{"a": 1')])),
    "cut before the name": (BareCalls(), '{"na', ('{"na', "", [])),
}


def _read(reader: Reader, parts: list[str]) -> Read:
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for piece in [piece for part in parts for piece in reader.push(part)] + reader.end():
        if piece.meaning is Meaning.CALL:
            calls.append((piece.text, ""))
        elif piece.meaning is Meaning.ARGUMENTS:
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
        elif piece.meaning is Meaning.REASONING:
            reasoning += piece.text
        else:
            content += piece.text
    return content, reasoning, calls


def _fresh(reader: Reader, name: str) -> Reader:
    if isinstance(reader, BareCalls):
        return BareCalls()
    if name == "thinking from the start":
        return TaggedReader({}, thinks=True)
    return type(reader)(() if name in ("no tools, no calls", "harmony, final") else _TOOLS)


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_formats_are_read_in_parts_of_any_size(name: str, size: int) -> None:
    reader, text, expected = _CASES[name]
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    read = _read(_fresh(reader, name), parts)
    assert (read[0].strip(), *read[1:]) == expected
    for _, arguments in read[2]:
        assert "cut" in name or isinstance(json.loads(arguments), dict)


def test_arguments_come_while_they_are_written() -> None:
    reader = TaggedReader(_TOOLS)
    assert reader.push('<tool_call>{"name": "wea') == []
    assert [(piece.meaning, piece.text) for piece in reader.push('ther", "arguments": {"ci')] == [
        (Meaning.CALL, "weather"),
        (Meaning.ARGUMENTS, '{"ci'),
    ]
    assert [piece.text for piece in reader.push('ty": "O')] == ['ty": "O']


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<|start_header_id|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|channel|>final", "harmony"),
        ("<think>", "hermes"),
    ],
)
def test_the_template_tells_the_format(template: str, name: str) -> None:
    found = format_of(template)
    assert found is not None and found.name == name
    assert format_of("{{ messages }}") is None and format_of(None) is None
