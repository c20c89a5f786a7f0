"""/v1/responses through the official client: text, schemas, calls, and streams whose events add up."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import bundled, run

from outrider import SamplingParams
from outrider.codecs.chat_formats import TaggedReader
from outrider.core.request import Stats
from outrider.server.dialogue import Dialogue
from outrider.server.queued_request import Order
from outrider.server.response_store import ResponseStore, StoreLimits
from outrider.server.responses import ResponseAnswer
from outrider.server.responses_protocol import ResponsesRequest
from outrider.server.service import Service
from outrider.server.transcript import Added

_CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOOLS: Any = [{"type": "function", "name": name, "parameters": _CITY, "strict": True} for name in ("weather", "time")]
_ASKED: dict[str, Any] = {"model": "outrider-bundled", "input": "Tell me of a fox.", "max_output_tokens": 12}


def _with_client(work: Callable[[Any], Awaitable[None]]) -> None:
    openai = pytest.importorskip("openai")  # it takes a second to import

    async def inner(service: Service, client: Any) -> None:
        del service
        await work(openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=client))

    run(inner)


def test_text_is_that_of_the_chat_api_and_streams_add_up() -> None:
    async def work(client: Any) -> None:
        said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me of a fox."}]
        seeded = {"seed": 3}
        chat = await client.chat.completions.create(model="outrider-bundled", messages=said, max_tokens=12, **seeded)
        asked = {**_ASKED, "instructions": "Be kind.", "extra_body": seeded}
        whole = await client.responses.create(**asked)
        assert whole.output_text == chat.choices[0].message.content and whole.status == "incomplete"
        assert whole.usage.output_tokens == 12 and whole.usage.input_tokens == chat.usage.prompt_tokens
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:4]] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text == events[-1].response.output_text
        assert [event.type for event in events[-4:]] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]

    _with_client(work)


def test_schemas_and_tools() -> None:
    async def work(client: Any) -> None:
        form = {"format": {"type": "json_schema", "name": "city", "schema": _CITY}}
        answer = await client.responses.create(**{**_ASKED, "max_output_tokens": 40}, text=form)
        assert json.loads(answer.output_text)["city"] in ("Oslo", "Rome")
        for choice in ("required", {"type": "function", "name": "time"}):
            asked = {**_ASKED, "max_output_tokens": 60, "parallel_tool_calls": False}
            called = await client.responses.create(**asked, tools=_TOOLS, tool_choice=choice)
            call = called.output[0]
            assert call.type == "function_call" and json.loads(call.arguments)["city"] and called.status == "completed"
            assert call.name == "time" or choice == "required"
        turns: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
            {"type": "function_call", "call_id": call.call_id, "name": "time", "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
        ]
        again = await client.responses.create(**{**_ASKED, "input": turns})
        assert again.output[0].type == "message"

    _with_client(work)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "whole conversation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "send the item itself"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"background": True}, "stream"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"role": "user", "content": 5}]}, "text or a list of parts"),
        ({"input": [{"role": "root", "content": "x"}]}, "role"),
        ({"tools": _TOOLS, "tool_choice": {"type": "function", "name": "tine"}}, "did you mean 'time'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_be_answered_is_said(fields: dict[str, Any], words: str) -> None:
    async def work(service: Service, client: Any) -> None:
        answer = await client.post("/v1/responses", json={**_ASKED, **fields})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text

    run(work)


def test_thinking_text_and_calls_are_items_of_their_own() -> None:
    requests = bundled().requests(["x"], SamplingParams())
    order = Order(requests, [], "", None, False, new_reader=lambda: TaggedReader({"weather": {}}))
    asked = ResponsesRequest(input="x")
    talk = Dialogue.of(asked, ResponseStore(StoreLimits(0, 0, 0)).of("me"))
    text = '<think>hm</think>Yes.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    answers = [ResponseAnswer(order, asked=asked, talk=talk, model="m", codec=bundled().codec) for _ in range(2)]
    events: list[dict[str, Any]] = []
    for start in range(0, len(text), 7):
        is_last = start + 7 >= len(text)
        delta = Added(
            0, text[start : start + 7], [1], [], finish_reason="stop" if is_last else None, stats=Stats() if is_last else None
        )
        for answer in answers:
            answer.add(delta)
        events += [json.loads(one.split("data: ")[1]) for one in answers[0].stream_events(delta)]
    whole = answers[1].whole()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    streamed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    plain = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in whole["output"]]
    assert [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in streamed] == plain
    assert plain[2]["arguments"] == '{"city": "Oslo"}' and whole["status"] == "completed"
