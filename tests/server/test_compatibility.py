"""What clients of other servers send: null, predictions, tools, structured outputs, scores of prompts, vLLM's fields."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from inprocess import bundled, run, until

from outrider import SamplingParams
from outrider.codecs.chat_formats import TaggedReader
from outrider.core.request import Stats
from outrider.server import tools
from outrider.server.chat_answers import ChatAnswer
from outrider.server.queued_request import Order
from outrider.server.service import Service
from outrider.server.transcript import Added

_PROMPT = "Once upon a time"
_CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_SUM = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
_TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": _CITY}},
    {"type": "function", "function": {"name": "add", "parameters": _SUM}},
]


def _ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def work(service: Service, client: Any) -> None:
        answer = await client.post(path, json=body)
        found.update(answer.json(), status=answer.status_code)

    run(work)
    return found


_complete = partial(_ask, "/v1/completions")


def _chat(**body: Any) -> dict[str, Any]:
    return _ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "The weather?"}], "seed": 1, **body})


def _alone(**params: Any) -> str:
    return bundled().generate(_PROMPT, SamplingParams(**params))[0].text


def test_null_is_as_good_as_nothing() -> None:
    fields = (
        "n stream stop temperature top_p logit_bias logprobs echo best_of suffix presence_penalty user stream_options".split()
    )
    body = {"prompt": _PROMPT, "max_tokens": 5, "seed": 2, **dict.fromkeys(fields)}
    assert _complete(body)["choices"][0]["text"] == _alone(max_tokens=5, seed=2, temperature=1)
    fields = "tools tool_choice functions response_format max_tokens stop seed reasoning_effort parallel_tool_calls".split()
    assert _chat(**{**dict.fromkeys(fields), "max_completion_tokens": 3})["status"] == 200


def test_a_prediction_is_a_draft_and_changes_nothing() -> None:
    text = _alone(max_tokens=48, ignore_eos=True)
    body = {"prompt": _PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    for content in (text, [{"type": "text", "text": text}], "Nothing of the kind."):
        answer = _complete({**body, "prediction": {"type": "content", "content": content}})
        assert answer["choices"][0]["text"] == text and answer["speculation"]["method"] == "prediction"
        if content == text:
            assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 24
    assert _complete({**body, "prediction": {"content": [{"type": "image"}]}})["status"] == 400


def test_lanes_of_predictions_do_not_stay() -> None:
    async def work(service: Service, client: Any) -> None:
        for text in ("a fox", "a dog"):
            body = {"prompt": _PROMPT, "max_tokens": 4, "prediction": {"type": "content", "content": text}}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert service.worker.scheduler.lanes == []

    run(work)


def test_one_of_several_tools_may_be_required() -> None:
    message = _chat(tools=_TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=60)["choices"][0]
    assert len(message["message"]["tool_calls"]) == 1
    call = message["message"]["tool_calls"][0]
    assert message["finish_reason"] == "tool_calls" and message["message"]["content"] is None
    assert call["function"]["name"] in ("weather", "add") and json.loads(call["function"]["arguments"])
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    only = _chat(tools=_TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, max_tokens=60)
    call = only["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "add" and json.loads(call["arguments"])["a"] in (1, 2)


@pytest.mark.parametrize("choice", ["required", "allowed"])
def test_several_required_tools_are_called_in_one_answer(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "NUM_CALLS", {"minItems": 3, "maxItems": 3})
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in _TOOLS]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    asked = {"messages": [{"role": "user", "content": "The weather?"}], "seed": 1, "max_tokens": 200, "tools": _TOOLS}
    asked |= {"tool_choice": "required" if choice == "required" else allowed}

    async def work(service: Service, client: Any) -> None:
        whole = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
        stream = await client.post("/v1/chat/completions", json={**asked, "stream": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in stream.text.strip().split("\n\n")[:-1]]
        calls = whole["message"]["tool_calls"]
        assert len({call["id"] for call in calls}) == 3 and whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] is None
        for call in calls:
            key = {"weather": "city", "add": "a"}[call["function"]["name"]]
            assert key in json.loads(call["function"]["arguments"])
        streamed = [{"name": "", "arguments": ""} for _ in calls]
        for part in (part for one in chunks for part in one["choices"][0]["delta"].get("tool_calls", ())):
            for key, text in part["function"].items():
                streamed[part["index"]][key] += text
        assert streamed == [call["function"] for call in calls]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    run(work)


def test_functions_of_old_are_answered_as_of_old() -> None:
    functions = [tool["function"] for tool in _TOOLS]
    message = _chat(functions=functions, function_call={"name": "weather"}, max_tokens=60)["choices"][0]["message"]
    assert message["function_call"]["name"] == "weather" and json.loads(message["function_call"]["arguments"])["city"]
    unknown = _chat(functions=functions, function_call={"name": "wether"})
    assert unknown["status"] == 400 and "did you mean 'weather'" in unknown["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["red", "green"]}, {"red", "green"}),
        ({"structured_outputs": {"choice": ["red", 'a "b"']}}, {"red", 'a "b"'}),
        ({"guided_regex": "(ab|cd)"}, {"ab", "cd"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, {"x", "yy"}),
        ({"guided_json": {"enum": [7, 8]}}, {"7", "8"}),
        ({"guided_json": '{"enum": [7, 8]}'}, {"7", "8"}),
    ],
)
def test_grammars_by_vllms_names(fields: dict[str, Any], texts: set[str]) -> None:
    answer = _complete({"prompt": _PROMPT, "max_tokens": 30, "seed": 1, **fields})
    assert answer["choices"][0]["text"] in texts


def test_two_grammars_are_one_too_many() -> None:
    answer = _complete({"prompt": _PROMPT, "guided_regex": "a", "response_format": {"type": "json_object"}})
    assert answer["status"] == 400 and "both constrain" in answer["error"]["message"]


def test_banned_words_and_allowed_tokens() -> None:
    text = _complete({"prompt": _PROMPT, "temperature": 0, "max_tokens": 30, "bad_words": ["little", "girl named"]})
    assert "little" not in text["choices"][0]["text"] and "girl named" not in text["choices"][0]["text"]
    ids = bundled().codec.encode("a b", add_special_tokens=False)
    some = _complete({"prompt": _PROMPT, "max_tokens": 12, "allowed_token_ids": ids, "ignore_eos": True})["choices"][0]["text"]
    assert set(some) <= set("".join(map(bundled().codec.token_text, ids)))
    assert _complete({"prompt": _PROMPT, "allowed_token_ids": [10**6]})["status"] == 400


def test_echoed_prompts_have_their_scores() -> None:
    body = {"prompt": _PROMPT, "echo": True, "logprobs": 2, "temperature": 0}
    whole = _complete({**body, "max_tokens": 2})["choices"][0]
    scored = _complete({**body, "max_tokens": 0})
    entry, only = whole["logprobs"], scored["choices"][0]["logprobs"]
    num_prompt = scored["usage"]["prompt_tokens"]
    assert whole["text"].startswith(_PROMPT) and scored["choices"][0]["text"] == _PROMPT
    assert entry["token_logprobs"][0] is None and len(entry["tokens"]) == num_prompt + 2
    assert only["token_logprobs"] == entry["token_logprobs"][:num_prompt] and scored["usage"]["completion_tokens"] == 0
    assert all(len(top) >= 2 for top in entry["top_logprobs"][1:])
    told = _complete({"prompt": _PROMPT + whole["text"].removeprefix(_PROMPT), "echo": True, "logprobs": 0, "max_tokens": 0})
    again = told["choices"][0]["logprobs"]["token_logprobs"]
    assert again[num_prompt:] == pytest.approx(entry["token_logprobs"][num_prompt:], abs=1e-3)


def test_prompt_logprobs_have_ranks() -> None:
    long = "Once upon a time there was a little fox. " * 30  # more than one pass
    answer = _complete({"prompt": long, "prompt_logprobs": 1, "max_tokens": 1})
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == answer["usage"]["prompt_tokens"] > 256
    assert all(1 <= len(entry) <= 2 and min(one["rank"] for one in entry.values()) == 1 for entry in entries[1:])
    repeated = [max(one["logprob"] for one in entry.values()) for entry in entries[-40:]]
    assert sum(repeated) / len(repeated) > -1.5


def test_text_offsets_go_on_through_a_stream() -> None:
    async def work(service: Service, client: Any) -> None:
        body = {"prompt": _PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0, "echo": True}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        stream = await client.post("/v1/completions", json={**body, "stream": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in stream.text.strip().split("\n\n")[:-1]]
        offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == whole["text_offset"] == sorted(offsets) and len(offsets) == len(whole["tokens"])

    run(work)


def test_best_of_keeps_the_most_probable() -> None:
    body = {"prompt": [_PROMPT, "The dog"], "max_tokens": 8, "seed": 3, "logprobs": 0}
    every = _complete({**body, "n": 4})["choices"]
    best = _complete({**body, "n": 2, "best_of": 4})["choices"]
    mean = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])  # noqa: E731
    for prompt in (0, 1):
        expected = sorted(every[4 * prompt : 4 * prompt + 4], key=mean, reverse=True)[:2]
        assert [one["text"] for one in best[2 * prompt : 2 * prompt + 2]] == [one["text"] for one in expected]
    assert [one["index"] for one in best] == [0, 1, 2, 3]
    assert _complete({**body, "best_of": 3, "stream": True})["status"] == 400


def test_prompts_are_cut_from_the_left_when_asked() -> None:
    ids = bundled().codec.encode("The dog ran. " + _PROMPT)
    whole = _complete({"prompt": ids[-3:], "max_tokens": 6, "temperature": 0})
    cut = _complete({"prompt": "The dog ran. " + _PROMPT, "max_tokens": 6, "temperature": 0, "truncate_prompt_tokens": 3})
    assert cut["usage"]["prompt_tokens"] == 3 and cut["choices"][0]["text"] == whole["choices"][0]["text"]


def test_a_salted_prompt_is_not_shared_and_priorities_wait() -> None:
    async def work(service: Service, client: Any) -> None:
        body = {"prompt": _PROMPT * 8, "max_tokens": 2, "cache_salt": "mine", "priority": 5}
        for _ in range(2):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        prefixes = service.worker.scheduler.prefixes
        assert prefixes is not None and prefixes.num_hits == 0
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": _PROMPT * 8, "max_tokens": 2})
        assert prefixes.num_hits == 1
        assert (await client.post("/v1/completions", json={**body, "priority": -1})).status_code == 400

    run(work)


def test_a_gap_can_only_be_filled_by_a_model_made_for_it() -> None:
    answer = _complete({"prompt": _PROMPT, "suffix": "The end."})
    assert answer["status"] == 400 and "fill gaps" in answer["error"]["message"]


def test_calls_and_thoughts_are_streamed_as_they_come() -> None:
    codec = bundled().codec
    requests = bundled().requests([_PROMPT], SamplingParams())
    order = Order(requests, [], "", None, False, new_reader=partial(TaggedReader, ("weather",)))
    text = '<think>hm</think>Yes.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    parts = [text[start : start + 5] for start in range(0, len(text), 5)]
    answer, deltas = ChatAnswer(order, model="m", codec=codec), []
    for number, part in enumerate(parts, 1):
        is_last = number == len(parts)
        delta = Added(0, part, [1], [], finish_reason="stop" if is_last else None, stats=Stats() if is_last else None)
        answer.add(delta)
        deltas.append(answer.chunk(delta)["choices"][0])
    message = answer.whole()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm" and message["content"] == "Yes."
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert "".join(one["delta"].get("reasoning_content", "") for one in deltas) == "hm"
    calls = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Oslo"}' and len(calls) > 2
    assert sum("id" in call for call in calls) == 1 and {call["index"] for call in calls} == {0}
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_tokens_of_a_text_and_back() -> None:
    text = "Once upon a time, a fox."
    told = _ask("/tokenize", {"prompt": text, "return_token_strs": True, "add_special_tokens": False})
    assert told["tokens"] == bundled().codec.encode(text, add_special_tokens=False) and told["count"] == len(told["token_strs"])
    assert _ask("/detokenize", {"tokens": told["tokens"]})["prompt"] == text
    messages = [{"role": "user", "content": text}]
    chat = _ask("/tokenize", {"messages": messages})
    assert chat["tokens"] == bundled().codec.encode_chat(messages) and chat["max_model_len"] == bundled().target.max_len
    assert _ask("/detokenize", {"tokens": [10**7]})["status"] == 400 and _ask("/tokenize", {})["status"] == 400


def test_variables_of_the_chat_template_are_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = bundled().codec
    monkeypatch.setattr(codec, "chat_template", "{{ manner }}: {{ messages[0].content }}")
    told = _chat(max_tokens=1, chat_template_kwargs={"manner": "Say it in very few words"})
    text = "Say it in very few words: The weather?"
    assert told["usage"]["prompt_tokens"] == len(codec.encode(text, add_special_tokens=False))
    assert _chat(chat_template_kwargs={"messages": []})["status"] == 400


def test_a_required_call_is_streamed_argument_by_argument() -> None:
    async def work(service: Service, client: Any) -> None:
        asked = {"messages": [{"role": "user", "content": "The weather?"}], "seed": 1, "max_tokens": 60, "tools": _TOOLS}
        asked["parallel_tool_calls"] = False
        whole = (await client.post("/v1/chat/completions", json={**asked, "tool_choice": "required"})).json()["choices"][0]
        stream = await client.post("/v1/chat/completions", json={**asked, "tool_choice": "required", "stream": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in stream.text.strip().split("\n\n")[:-1]]
        calls = [call["function"] for one in chunks for call in one["choices"][0]["delta"].get("tool_calls", ())]
        expected = whole["message"]["tool_calls"][0]["function"]
        assert [call["name"] for call in calls if "name" in call] == [expected["name"]]
        assert "".join(call["arguments"] for call in calls) == expected["arguments"] and len(calls) > 1
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls" == whole["finish_reason"]

    run(work)


def test_who_leaves_while_its_prompt_is_scored_frees_everything() -> None:
    async def work(service: Service, client: Any) -> None:
        body = {"prompt": "Once upon a time there was a fox. " * 60, "echo": True, "logprobs": 0, "max_tokens": 1}
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while not service.num_active:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        again = await client.post("/v1/completions", json={**body, "prompt": _PROMPT})
        assert again.status_code == 200
        await until(lambda: service.worker.scheduler.is_idle and service.num_active == 0)

    run(work)
