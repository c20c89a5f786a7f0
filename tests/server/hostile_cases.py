"""Requests that were made to do harm, as a table: a name, a path, a body, and the answers that are in order.

A body of bytes is sent as it is; anything else as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from hostile_sizes import made_cases

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_REFUSED = (400,)
_EITHER = (200, 400)
_TOO_LARGE = (413,)


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Any
    statuses: tuple[int, ...] = _REFUSED
    method: str = "POST"


@cache
def all_cases() -> list[Case]:
    sizes = [Case(*made) for made in made_cases()]
    return [*_prompts(), *_schemas(), *_tools(), *_conversations(), *_fields(), *_halves(), *_raw(), *_routes(), *sizes]


def _complete(name: str, statuses: tuple[int, ...] = _REFUSED, **fields: Any) -> Case:
    return Case(name, COMPLETIONS, {"prompt": "Once", "max_tokens": 2, **fields}, statuses)


def _chat(name: str, statuses: tuple[int, ...] = _REFUSED, **fields: Any) -> Case:
    return Case(name, CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}, statuses)


def _prompts() -> list[Case]:
    prompts = {
        "a million letters": "once upon a time " * 60_000,
        "a million letters without a space": "a" * 1_000_000,
        "a million spaces": " " * 1_000_000,
        "a million emoji": "🦊" * 250_000,
        "a quarter of a million tokens": [5] * 250_000,
        "a quarter of a million tokens and a text": [*[5] * 250_000, "x"],
        "a hundred thousand texts": ["x"] * 100_000,
        "lists in lists in lists": [[[1]]],
        "a token below zero": [-1],
        "a token that is too large": [10**9],
        "a token that is huge": [10**30],
        "half a token": [1.5],
        "a truth as a token": [True, False],
        "nothing in a list": [[]],
        "an object": {"a": 1},
        "a number": 7,
        "no list": [],
        "half a surrogate pair": "\ud800",
    }
    huge = {
        "a million tokens": [5] * 1_000_000,
        "a million tokens and a text": [*[5] * 500_000, "x"],
        "a million commas": "," * 1_000_000,
    }
    odd = {
        "no text": "",
        "zeros": "\x00" * 50,
        "control characters": "".join(map(chr, range(32))),
        "marks on one letter": "e" + "\u0301" * 400,
        "right to left": "\u202e" * 50,
        "special tokens as text": "<|endoftext|></s><s><unk><|im_start|>" * 10,
    }
    kinds = ((prompts, _REFUSED), (huge, _TOO_LARGE), (odd, _EITHER))
    return [_complete(f"prompt: {name}", codes, prompt=one) for kind, codes in kinds for name, one in kind.items()]


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def schemas() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Schemas that are too much, cannot be satisfied, or are none."""
    named = {f"p{i}": {"type": "string"} for i in range(12_000)}
    first = {size: {"type": "object", "properties": dict(list(named.items())[:size])} for size in (500, 1000, 3000, 12_000)}
    return {
        **{f"{size} optional properties": (schema, _REFUSED) for size, schema in first.items()},
        "nested 30 deep": (_nested(30), _EITHER),
        "nested 300 deep": (_nested(300), _REFUSED),
        "no choice": ({"enum": []}, _REFUSED),
        "a range that is empty": ({"type": "integer", "minimum": 2, "maximum": 1}, _REFUSED),
        "a property that cannot be": ({"type": "object", "required": ["a"], "properties": {"a": False}}, _REFUSED),
        "text and number": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, _REFUSED),
        "a type that is none": ({"type": "nope"}, _REFUSED),
        "an unknown keyword": ({"not": {"type": "string"}}, _REFUSED),
        "itself": ({"$ref": "#"}, _EITHER),
        "a reference to nothing": ({"$ref": "#/$defs/none"}, _REFUSED),
        "a reference to elsewhere": ({"$ref": "http://localhost:1/x.json"}, _REFUSED),
        "a list without end": ({"type": "array", "minItems": 10**9, "items": {"type": "null"}}, _EITHER),
        "a text without end": ({"type": "string", "minLength": 10**9}, _EITHER),
        "a pattern of a million": ({"type": "string", "pattern": "(a{1000}){1000}"}, _EITHER),
        "patterns within patterns": ({"type": "string", "pattern": "((((a*)*)*)*)*b"}, _EITHER),
        "a pattern that is none": ({"type": "string", "pattern": "(("}, _REFUSED),
        "a choice of thousands": ({"enum": [f"choice {i}" for i in range(5000)]}, _EITHER),
        "anyOf of hundreds": ({"anyOf": [{"const": {"a": i}} for i in range(800)]}, _EITHER),
        "unevaluated": ({"type": "object", "unevaluatedProperties": False, "properties": {"a": {}}}, _EITHER),
        "options that are none": ({"x-guidance": "no"}, _REFUSED),
    }


def _schemas() -> list[Case]:
    wanted = lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}  # noqa: E731
    made = [_complete(f"schema: {name}", codes, response_format=wanted(one)) for name, (one, codes) in schemas().items()]
    texts: dict[str, tuple[str, Any]] = {
        "look-ahead": ("guided_regex", "(?=a)b"),
        "a range upside down": ("guided_regex", "[z-a]"),
        "thousands of brackets": ("guided_regex", "(" * 5000 + ")" * 5000),
        "a long one": ("guided_regex", "a?" * 100_000),
        "an empty choice": ("guided_choice", [""]),
        "no choice": ("guided_choice", []),
        "an open rule": ("guided_grammar", "root ::= ("),
        "no rule": ("guided_grammar", "x"),
        "a rule that never ends": ("guided_grammar", 'root ::= root "a"'),
        "a schema that is no JSON": ("guided_json", "{"),
        "a schema that is a list": ("guided_json", "[]"),
    }
    return made + [_complete(f"grammar: {name}", **{field: value}) for name, (field, value) in texts.items()]


def _tools() -> list[Case]:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bad = {"type": "function", "function": {"name": "f", "parameters": schemas()["500 optional properties"][0]}}
    return [
        _chat("tools: a schema that is too much", tools=[bad], tool_choice="required"),
        _chat("tools: a thousand", tools=[tool] * 1000),
        _chat("tools: required and none", tools=[], tool_choice="required"),
        _chat("tools: one that is not there", tools=[tool], tool_choice={"type": "function", "function": {"name": "g"}}),
        _chat("tools: a name with a quote", tools=[{"type": "function", "function": {"name": 'f"}'}}]),
        _chat("tools: no name", tools=[{"type": "function", "function": {}}]),
        _chat("tools: another type", tools=[{"type": "web_search"}]),
        _chat(
            "tools: none of the allowed", tools=[tool], tool_choice={"type": "allowed_tools", "allowed_tools": {"tools": []}}
        ),
        _chat("tools: with a schema", tools=[tool], tool_choice="required", response_format={"type": "json_object"}),
        _chat("functions: one that is not there", functions=[{"name": "f"}], function_call={"name": "g"}),
    ]


def _conversations() -> list[Case]:
    said = {"role": "user", "content": "x"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    return [
        _chat("messages: fifteen thousand", (400,), messages=[said] * 15_000),
        _chat("messages: twenty thousand", _TOO_LARGE, messages=[said] * 20_000),
        _chat("messages: none", messages=[]),
        _chat("messages: a role that is none", messages=[{"role": "root", "content": "x"}]),
        _chat("messages: no role", messages=[{"content": "x"}]),
        _chat("messages: an image", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        _chat("messages: parts that are none", messages=[{"role": "user", "content": [{"type": "text", "text": {"a": 1}}]}]),
        _chat("messages: a number", messages=[{"role": "user", "content": 5}]),
        _chat("messages: calls cut short", _EITHER, messages=[said, calls]),
        _chat("messages: calls that are text", _EITHER, messages=[{**calls, "tool_calls": "x"}]),
        _chat("messages: a million letters", messages=[{"role": "user", "content": "a b " * 300_000}]),
        _chat("messages: only an assistant", _EITHER, messages=[{"role": "assistant", "content": "x"}]),
        _chat("template: other messages", chat_template_kwargs={"messages": []}),
        _chat("template: odd values", _EITHER, chat_template_kwargs={"bos_token": {"a": [1]}, "x": "{{ 7 * 7 }}"}),
        _chat("template: too many values", chat_template_kwargs={f"v{i}": i for i in range(100)}),
    ]


def _fields() -> list[Case]:
    """Every field with values that no field of its kind has."""
    numbers = "n temperature top_p top_k min_p typical_p presence_penalty repetition_penalty min_tokens logprobs".split()
    odd: dict[str, Any] = {"below": -1e6, "above": 1e9, "a text": "x", "a list": [1], "an object": {}}
    made = [_complete(f"{field}: {name}", **{field: value}) for field in numbers for name, value in odd.items()]
    more: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        "max_tokens: a billion": ({"max_tokens": 10**9}, _REFUSED),
        "max_tokens: below": ({"max_tokens": -1}, _REFUSED),
        "seed: too large": ({"seed": 10**40}, _REFUSED),
        "n times prompts": ({"prompt": ["x"] * 20, "n": 20}, _REFUSED),
        "best_of: too many": ({"best_of": 10**6}, _REFUSED),
        "stop: too many": ({"stop": ["x"] * 100}, _REFUSED),
        "stop: empty": ({"stop": ""}, _REFUSED),
        "stop: long": ({"stop": "x" * 1000}, _REFUSED),
        "stop_token_ids: none of ours": ({"stop_token_ids": [10**8]}, _REFUSED),
        "logit_bias: a hundred thousand": ({"logit_bias": {str(i): 1 for i in range(100_000)}}, _TOO_LARGE),
        "logit_bias: of words": ({"logit_bias": {"fox": 1}}, _REFUSED),
        "logit_bias: everything away": ({"logit_bias": {str(i): -100 for i in range(1000)}}, _EITHER),
        "allowed_token_ids: none of ours": ({"allowed_token_ids": [-1]}, _REFUSED),
        "allowed_token_ids: a million": ({"allowed_token_ids": [1] * 1_000_000}, _TOO_LARGE),
        "bad_words: a thousand": ({"bad_words": ["x"] * 1000}, _REFUSED),
        "bad_words: empty": ({"bad_words": [""]}, _REFUSED),
        "bad_words: every letter": ({"bad_words": list("abcdefghijklmnopqrstuvwxyz")}, _EITHER),
        "min_tokens with a grammar that ends": ({"min_tokens": 50, "max_tokens": 60, "guided_regex": "ab"}, _EITHER),
        "truncate_prompt_tokens: none": ({"truncate_prompt_tokens": 0}, _REFUSED),
        "prompt_logprobs: too many": ({"prompt_logprobs": 10_000}, _REFUSED),
        "priority: before all others": ({"priority": -(10**6)}, _REFUSED),
        "cache_salt: long": ({"cache_salt": "x" * 10_000}, _REFUSED),
        "speculation: no such method": ({"speculation": {"method": "../../etc"}}, _REFUSED),
        "speculation: no such way": ({"speculation": "on"}, _REFUSED),
        "speculation: a million guesses": ({"speculation": {"max_tokens": 10**6}}, _REFUSED),
        "speculation: a thousand guesses": ({"speculation": {"max_tokens": 1000}}, (200,)),
        "prediction: a million letters": ({"prediction": {"content": "fox " * 250_000}}, _REFUSED),
        "prediction: no text": ({"prediction": {"content": ""}}, (200,)),
        "prediction: control characters": ({"prediction": {"content": "\x00\ufffd"}}, (200,)),
        "suffix: for a model without": ({"suffix": "end"}, _REFUSED),
        "model: another": ({"model": "../secret"}, (404,)),
        "an unknown field": ({"admin": True}, _REFUSED),
        "a field of Python": ({"__class__": "x"}, _REFUSED),
        "repetition: extreme": ({"repetition_penalty": 100, "temperature": 100}, (200,)),
        "temperature: nearly none": ({"temperature": 1e-300}, _EITHER),
    }
    others = "plain suffix lookahead jacobi draft-tree early-exit multi-draft".split()
    made += [_complete(f"speculation: by {name}", (200,), speculation={"method": name}) for name in others]
    return made + [_complete(name, codes, **fields) for name, (fields, codes) in more.items()]


_HALF = "\ud800"
"""Half a surrogate pair: JSON may hold it, no text may."""


def _halves() -> list[Case]:
    """The same in every place that takes a text, where it may come back in an error or in the answer."""
    fields: dict[str, Any] = {
        "guided_regex": _HALF,
        "guided_choice": [_HALF],
        "guided_grammar": f'root ::= "{_HALF}"',
        "guided_json": {"const": _HALF},
        "bad_words": [_HALF],
        "stop": _HALF,
        "user": _HALF,
        "cache_salt": _HALF,
        "prediction": {"content": _HALF},
        "speculation": {"method": _HALF},
        "suffix": _HALF,
        _HALF: 1,
    }
    made = [_complete(f"half a letter: {name!a}", _EITHER, **{name: value}) for name, value in fields.items()]
    made.append(_complete("half a letter: model", (404,), model=_HALF))
    made.append(
        Case(
            "half a letter: metadata",
            "/v1/responses",
            {"input": "x", "metadata": {"a": _HALF}, "max_output_tokens": 1},
            _EITHER,
        )
    )
    made.append(_chat("half a letter: message", messages=[{"role": "user", "content": _HALF}]))
    return made


def _raw() -> list[Case]:
    bodies = {
        "nothing": b"",
        "an open brace": b"{",
        "null": b"null",
        "a list": b"[]",
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"a":' * 50_000,
        "not a number": b'{"prompt": "x", "temperature": NaN}',
        "infinity": b'{"prompt": "x", "temperature": Infinity}',
        "a number of thousands of digits": b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}",
        "bytes that are no text": b'{"prompt": "\xff\xfe"}',
        "the same field twice": b'{"prompt": "x", "prompt": 5, "max_tokens": 1}',
        "a mark at the beginning": b'\xef\xbb\xbf{"prompt": "x"}',
        "two objects": b'{"prompt": "x"}{"prompt": "y"}',
    }
    large = json.dumps({"prompt": "x", "user": "y" * 5_000_000}).encode()
    statuses = {"a mark at the beginning": _EITHER, "deep objects": (400, 413)}
    made = [Case(f"body: {n}", COMPLETIONS, body, statuses.get(n, _REFUSED)) for n, body in bodies.items()]
    return [*made, Case("body: five megabytes", COMPLETIONS, large, (413,))]


_REFERENCE = {"type": "item_reference", "id": "msg_1"}


def _bracketed(name: str) -> bytes:
    """An item whose field has hundreds of brackets: fewer than JSON's reader takes."""
    item = '{"role": "user", "content": "x", "' + name + '": ' + "[" * 900 + "]" * 900 + "}"
    return ('{"max_output_tokens": 1, "input": [' + item + "]}").encode()


def _routes() -> list[Case]:
    return [
        Case("route: nowhere", "/v1/../../etc/passwd", {}, (404,)),
        Case("route: another way", COMPLETIONS, {}, (405,), "GET"),
        Case("responses: a million letters", "/v1/responses", {"input": "a b " * 300_000}),
        Case("responses: items that are none", "/v1/responses", {"input": [{"type": "x" * 2000}]}),
        Case("responses: nothing", "/v1/responses", {"input": []}),
        Case("responses: a response of before", "/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
        Case("responses: another's response", "/v1/responses/resp_1", None, (404,), "GET"),
        Case("responses: a response far away", "/v1/responses/..%2f..%2fetc", None, (404,), "GET"),
        Case("responses: half a letter to delete", "/v1/responses/%ed%a0%80", None, (404,), "DELETE"),
        Case("responses: items of nobody", "/v1/responses/resp_1/input_items?limit=-1", None, (400, 404), "GET"),
        Case("responses: a number of megabytes", "/v1/responses", {"input": "x", "previous_response_id": "r" * 3_000_000}),
        Case("responses: a thousand references", "/v1/responses", {"input": [_REFERENCE] * 16_000}),
        Case("responses: a reference that is none", "/v1/responses", {"input": [{"type": "item_reference", "id": [1]}]}),
        Case("responses: brackets without end", "/v1/responses", _bracketed("more"), _EITHER),
        Case("responses: brackets in a part", "/v1/responses", _bracketed("content"), _EITHER),
        Case("route: a model far away", "/v1/models/..%2f..%2fetc", None, (404,), "GET"),
        Case("route: tokens of a million letters", "/tokenize", {"prompt": "a b " * 300_000}),
        Case("route: text of a token below zero", "/detokenize", {"tokens": [-5]}),
        Case("route: text of a million tokens", "/detokenize", {"tokens": [5] * 1_200_000}, _TOO_LARGE),
    ]
