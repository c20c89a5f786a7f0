"""Fields that clients of vLLM and OpenAI send: what they change in an answer, and how a wrong one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import bundled, run

from outrider.codecs.chat_template import open_ended
from outrider.core.errors import RequestError
from outrider.server.response_items import items_of
from outrider.server.responses_protocol import ResponsesRequest
from outrider.server.service import Service
from outrider.server.token_texts import Offsets, TokenTexts

_SAID = [{"role": "user", "content": "The weather?"}]
_CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _CITY}, "cache_control": {"type": "ephemeral"}}


def test_fields_of_other_servers_do_what_they_say() -> None:
    async def work(service: Service, client: Any) -> None:
        async def complete(**fields: Any) -> dict[str, Any]:
            answer = await client.post(
                "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 3, "seed": 1, **fields}
            )
            return answer.json()

        codec = service.llm.codec
        plain = await complete(logprobs=1, return_token_ids=True)
        [choice] = plain["choices"]
        assert codec.decode(choice["token_ids"]) == choice["text"] and len(choice["token_ids"]) == 3
        assert choice["prompt_token_ids"] == codec.encode("Once upon a time")
        named = (await complete(logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]["tokens"]
        assert named == [f"token_id:{token}" for token in choice["token_ids"]]
        assert (await complete(logprobs=False))["choices"][0]["logprobs"] is None
        greedy = (await complete(temperature=0))["choices"][0]["text"]
        assert (await complete(top_p=0, temperature=1.3))["choices"][0]["text"] == greedy
        long = await complete(prompt="a b " * 2000, truncate_prompt_tokens=-1, max_tokens=1)
        assert long["usage"]["prompt_tokens"] == service.llm.target.max_len - 1
        again = [await complete(prompt="Once upon a time " * 20) for _ in range(2)]
        assert again[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again[1]["choices"] == again[0]["choices"]
        refused = await complete(temprature=1)
        assert "did you mean 'temperature'" in refused["error"]["message"] and refused["error"]["param"] == "temprature"
        refused = await complete(stop=["x"] * 20)
        assert refused["error"]["param"] == "stop" and "at most 16" in refused["error"]["message"]

    run(work)


def test_a_required_tool_ends_with_tool_calls_and_a_named_one_does_not() -> None:
    """Programs that call tools in a loop go on where the reason is tool_calls."""
    pytest.importorskip("llguidance")

    async def work(service: Service, client: Any) -> None:
        async def reason(choice: Any, **fields: Any) -> dict[str, Any]:
            asked = {"messages": _SAID, "tools": [_TOOL], "tool_choice": choice, "max_tokens": 40, "seed": 1, **fields}
            answer = await client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["finish_reason"]

        assert await reason("required") == "tool_calls"
        assert await reason({"type": "function", "function": {"name": "weather"}}) == "stop"
        wanted = {"type": "json_object", "schema": _CITY}
        asked = {"messages": _SAID, "response_format": wanted, "max_tokens": 40, "seed": 1, "reasoning_effort": "xhigh"}
        said = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]["content"]
        assert json.loads(said) == {"city": "Oslo"}

    run(work)


def test_a_stream_says_what_was_used_so_far() -> None:
    async def work(service: Service, client: Any) -> None:
        for continuous in (False, True):
            options = {"include_usage": True, "continuous_usage_stats": continuous}
            asked = {"prompt": "Once", "max_tokens": 4, "seed": 1, "stream": True, "stream_options": options}
            text = (await client.post("/v1/completions", json=asked)).text
            *chunks, last = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
            counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts) and counts[-1] == 4 if continuous else set(counts) == {None}

    run(work)


def test_an_answer_goes_on_with_the_last_message() -> None:
    async def work(service: Service, client: Any) -> None:
        begun = [*_SAID, {"role": "assistant", "content": "The sun is"}]
        asked = {"messages": begun, "max_tokens": 4, "seed": 1, "continue_final_message": True, "return_token_ids": True}
        choice = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
        prompt = service.llm.codec.decode(choice["prompt_token_ids"], skip_special_tokens=False)
        assert prompt.endswith("The sun is") and choice["message"]["content"]
        both = await client.post("/v1/chat/completions", json={**asked, "add_generation_prompt": True})
        assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"

    run(work)


def test_where_a_rendered_message_ends() -> None:
    assert open_ended("<u>a</u><a>so it </a>", "so it ") == "<u>a</u><a>so it "
    assert open_ended("<a>so it</a>", " so it\n") == "<a>so it"
    with pytest.raises(RequestError, match="cannot be continued"):
        open_ended("<a>so</a>", "it")


def test_tokens_have_their_own_bytes_and_their_places_in_the_text() -> None:
    """Parts of a character are told by their bytes, and take a place together."""
    codec = bundled().codec
    text = "A 🦊 é.<|user|>"
    ids = codec.encode(text)
    texts = TokenTexts(codec)
    assert b"".join(bytes(texts.bytes_of(token)) for token in ids).decode() == text
    shown = codec.decode(ids)
    places = Offsets(codec).next(ids)
    assert places == sorted(places) and [shown[place:].startswith(".") for place in places].count(True) == 1
    assert places[-1] == len(shown)  # the special token has no place of its own


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    answer = {"type": "function_call_output", "call_id": "1", "output": "ok"}
    items = [{"role": "user", "content": "x"}, thought, refused, call, {**call, "call_id": "2"}, answer]
    asked = ResponsesRequest.model_validate({"input": items, "tools": [{"type": "function", "name": "f"}]})
    messages = asked.as_chat(items_of(items)).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    told = messages[1].model_dump()
    assert told["content"] == "No." and told["reasoning_content"] == "hm"
    assert [one["id"] for one in told["tool_calls"]] == ["1", "2"]


def test_the_responses_api_tells_log_probabilities() -> None:
    async def work(service: Service, client: Any) -> None:
        asked = {"input": "Hi", "max_output_tokens": 4, "seed": 1, "top_logprobs": 1}
        [item] = (await client.post("/v1/responses", json=asked)).json()["output"]
        whole = item["content"][0]["logprobs"]
        assert "".join(one["token"] for one in whole) == item["content"][0]["text"] and len(whole[0]["top_logprobs"]) == 1
        text = (await client.post("/v1/responses", json={**asked, "stream": True})).text
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        parts = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
        done = next(event for event in events if event["type"] == "response.output_text.done")
        assert parts == done["logprobs"] == whole

    run(work)
