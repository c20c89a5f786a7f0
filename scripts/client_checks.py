"""What clients of the OpenAI API are asked to do: a call and a check of its answer per client and feature.

``clients.py`` runs them, each client in a process of its own. The JavaScript client has its checks in ``clients.mjs``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

MODEL = "outrider-bundled"
PROMPT = "Once upon a time, there was a"
SAID: list[Any] = [{"role": "user", "content": PROMPT}]
NAMES = ("Tom", "Lily")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": list(NAMES)}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
FUNCTION = {"name": "greet", "description": "Greet somebody.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
OTHER: Any = {"type": "function", "function": {**FUNCTION, "name": "wave"}}
PREDICTED: Any = {"type": "content", "content": " little girl named Lily."}
_ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.7, "seed": 3}
Check = Callable[[], object]
"""One call and what its answer must be; anything false, or an exception, is a failure."""


def openai_checks(address: str) -> dict[str, Check]:
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    complete, chat = client.completions.create, client.chat.completions.create
    asked = {"model": MODEL, **_ASKED}
    long = {**asked, "max_tokens": 40}

    def text(**more: Any) -> str:
        return complete(prompt=PROMPT, **{**asked, **more}).choices[0].text

    def refused() -> bool:
        try:
            complete(prompt=PROMPT, **{**asked, "model": "another"})
        except openai.NotFoundError as error:
            return "not served here" in str(error)
        return False

    def message(**more: Any) -> Any:
        return chat(messages=SAID, **{**long, **more}).choices[0].message

    def events() -> list[str]:
        made = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=16, stream=True)
        return [event.type for event in made]

    def continued() -> bool:
        first = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=8)
        second = client.responses.create(model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=8)
        listed = [item.id for item in client.responses.input_items.list(second.id)]
        client.responses.delete(first.id)
        return client.responses.retrieve(second.id).output_text == second.output_text and first.output[0].id in listed

    only: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "greet"}}]}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": only}
    return {
        "models": lambda: [model.id for model in client.models.list()] == [MODEL],
        "text": text,
        "same seed, same text": lambda: text() == text(),
        "stream": lambda: "".join(c.choices[0].text for c in complete(prompt=PROMPT, stream=True, **asked)) == text(),
        "stop": lambda: "." not in text(stop=["."], max_tokens=60),
        "several choices": lambda: len(complete(prompt=PROMPT, n=3, **asked).choices) == 3,
        "log-probabilities": lambda: (
            len(complete(prompt=PROMPT, logprobs=2, **asked).choices[0].logprobs.token_logprobs) == 12  # pyright: ignore
        ),
        "log-probabilities of the prompt": lambda: _is_scored(
            complete(prompt=PROMPT, echo=True, logprobs=1, **{**asked, "max_tokens": 0}).choices[0].logprobs
        ),
        "chat": lambda: message().content,
        "usage of a stream": lambda: (
            [*chat(messages=SAID, stream=True, stream_options={"include_usage": True}, **asked)][-1].usage.completion_tokens  # pyright: ignore
            == 12
        ),
        "JSON schema": lambda: is_person(message(response_format=FORMAT).content),
        "tools": lambda: is_person(message(tools=[TOOL], tool_choice="required").tool_calls[0].function.arguments),
        "tools, streamed": lambda: is_person(
            _arguments(chat(messages=SAID, tools=[TOOL], tool_choice="required", stream=True, **long))
        ),
        "one of several tools": lambda: is_person(
            message(tools=[OTHER, TOOL], tool_choice="required").tool_calls[0].function.arguments
        ),
        "allowed tools": lambda: message(tools=[OTHER, TOOL], tool_choice=allowed).tool_calls[0].function.name == "greet",
        "older functions": lambda: is_person(
            message(functions=[FUNCTION], function_call={"name": "greet"}).function_call.arguments
        ),
        "prediction": lambda: message(prediction=PREDICTED).content == message().content,
        "responses": lambda: client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=16).output_text,
        "responses, stream": lambda: events()[-1] in ("response.completed", "response.incomplete"),
        "responses, continued": continued,
        "embeddings": lambda: (
            len(client.embeddings.create(model=MODEL, input=["a", "b"], extra_body={"pooling": "mean"}).data) == 2
        ),
        "fields of vLLM": lambda: text(max_tokens=20, extra_body={"guided_choice": list(NAMES)}) in NAMES,
        "speculation per request": lambda: (
            text(extra_body={"speculation": {"method": "suffix", "num_draft_tokens": 3}})
            == text(extra_body={"speculation": "off"})
        ),
        "errors": refused,
    }


def litellm_checks(address: str) -> dict[str, Check]:
    import litellm  # pyright: ignore

    known: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": "none"}
    asked = {"model": f"openai/{MODEL}", **known, **_ASKED}
    long = {**asked, "max_tokens": 40}

    def text(**more: Any) -> Any:
        return litellm.completion(messages=SAID, **{**asked, **more}).choices[0].message.content

    def chunks(**more: Any) -> Any:
        return litellm.completion(messages=SAID, stream=True, **{**asked, **more})

    def plain() -> str:
        model = {"model": f"text-completion-openai/{MODEL}"}
        return litellm.text_completion(prompt=PROMPT, **{**asked, **model}).choices[0].text

    def responses(**more: Any) -> Any:
        return litellm.responses(model=f"openai/{MODEL}", input=PROMPT, max_output_tokens=16, **known, **more)

    called = {"tools": [TOOL], "tool_choice": "required"}
    return {
        "text": plain,
        "same seed, same text": lambda: text() == text(),
        "stream": lambda: "".join(chunk.choices[0].delta.content or "" for chunk in chunks()) == text(),
        "stop": lambda: "." not in text(stop=["."], max_tokens=60),
        "several choices": lambda: len(litellm.completion(messages=SAID, n=3, **asked).choices) == 3,
        "chat": text,
        "usage of a stream": lambda: list(chunks(stream_options={"include_usage": True}))[-1].usage.completion_tokens == 12,
        "JSON schema": lambda: is_person(text(response_format=FORMAT, max_tokens=40)),
        "tools": lambda: is_person(
            litellm.completion(messages=SAID, **called, **long).choices[0].message.tool_calls[0].function.arguments
        ),
        "tools, streamed": lambda: is_person(_arguments(chunks(**called, max_tokens=40))),
        "responses": lambda: responses().output,
        "responses, continued": lambda: responses(previous_response_id=responses().id).output,
    }


def langchain_checks(address: str) -> dict[str, Check]:
    from langchain_openai import ChatOpenAI, OpenAI  # pyright: ignore

    known: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": "none", "model": MODEL, "seed": 3, "temperature": 0.7}
    chat, complete = ChatOpenAI(max_tokens=40, **known), OpenAI(max_tokens=12, **known)
    described = {"title": "person", "description": "Somebody.", **SCHEMA}
    unseeded = {key: value for key, value in known.items() if key != "seed"}
    stored = ChatOpenAI(max_tokens=40, use_responses_api=True, use_previous_response_id=True, **unseeded)
    with_tools = chat.bind_tools([TOOL], tool_choice="required")

    def structured(method: str) -> Check:
        return lambda: chat.with_structured_output(described, method=method).invoke(PROMPT)["name"] in NAMES  # pyright: ignore

    def whole(parts: Any) -> Any:
        first, *others = parts
        return sum(others, first)

    return {
        "text": lambda: complete.invoke(PROMPT),
        "same seed, same text": lambda: chat.invoke(PROMPT).content == chat.invoke(PROMPT).content,
        "stream": lambda: "".join(str(part.content) for part in chat.stream(PROMPT)) == chat.invoke(PROMPT).content,
        "stop": lambda: "." not in str(chat.invoke(PROMPT, stop=["."]).content),
        "log-probabilities": lambda: chat.bind(logprobs=True).invoke(PROMPT).response_metadata["logprobs"]["content"],
        "chat": lambda: chat.invoke(PROMPT).content,
        "usage of a stream": lambda: whole(chat.stream(PROMPT, stream_usage=True)).usage_metadata["output_tokens"] == 40,
        "JSON schema": structured("json_schema"),
        "schema as a tool": structured("function_calling"),
        "tools": lambda: with_tools.invoke(PROMPT).tool_calls[0]["args"]["name"] in NAMES,  # pyright: ignore
        "tools, streamed": lambda: whole(with_tools.stream(PROMPT)).tool_calls[0]["args"]["name"] in NAMES,
        "responses": lambda: stored.invoke(PROMPT).content,
        "responses, continued": lambda: stored.invoke([("user", PROMPT), stored.invoke(PROMPT), ("user", "And then?")]).content,
    }


def llama_index_checks(address: str) -> dict[str, Check]:
    from llama_index.core.llms import ChatMessage  # pyright: ignore
    from llama_index.core.prompts import PromptTemplate  # pyright: ignore
    from llama_index.core.tools import FunctionTool  # pyright: ignore
    from llama_index.llms.openai_like import OpenAILike  # pyright: ignore
    from pydantic import BaseModel

    known: dict[str, Any] = {"model": MODEL, "api_base": f"{address}/v1", "api_key": "none", "temperature": 0.7}
    known["additional_kwargs"] = {"seed": 3}
    llm, chat = OpenAILike(max_tokens=12, **known), OpenAILike(max_tokens=12, is_chat_model=True, **known)
    able = OpenAILike(max_tokens=40, is_chat_model=True, is_function_calling_model=True, **known)

    class Person(BaseModel):
        """Somebody."""

        name: Literal["Tom", "Lily"]

    described: dict[str, Any] = {"name": "greet", "description": "Greet somebody.", "fn_schema": Person}
    greet = FunctionTool.from_defaults(lambda name: f"Hello {name}", **described)

    def called(answer: Any) -> bool:
        return able.get_tool_calls_from_response(answer)[0].tool_kwargs["name"] in NAMES

    return {
        "text": lambda: llm.complete(PROMPT).text,
        "same seed, same text": lambda: llm.complete(PROMPT).text == llm.complete(PROMPT).text,
        "stream": lambda: list(llm.stream_complete(PROMPT))[-1].text == llm.complete(PROMPT).text,
        "stop": lambda: "." not in llm.complete(PROMPT, stop=["."], max_tokens=60).text,
        "chat": lambda: chat.chat([ChatMessage(role="user", content=PROMPT)]).message.content,
        "JSON schema": lambda: able.structured_predict(Person, PromptTemplate(PROMPT)).name in NAMES,
        "schema as a tool": lambda: able.as_structured_llm(Person).complete(PROMPT).raw.name in NAMES,
        "tools": lambda: called(able.chat_with_tools([greet], user_msg=PROMPT, tool_required=True)),
        "tools, streamed": lambda: called(list(able.stream_chat_with_tools([greet], user_msg=PROMPT, tool_required=True))[-1]),
    }


def is_person(text: str | None) -> bool:
    return json.loads(text or "")["name"] in NAMES


def _arguments(chunks: Any) -> str:
    """Arguments of a tool call that comes in pieces."""
    pieces = [chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices]
    return "".join(call.function.arguments or "" for calls in pieces for call in calls or ())


def _is_scored(scores: Any) -> bool:
    """The first token has no probability, all others have one."""
    first, *others = scores.token_logprobs
    return first is None and bool(others) and all(score <= 0 for score in others)


PYTHON = {
    "openai": openai_checks,
    "litellm": litellm_checks,
    "langchain-openai": langchain_checks,
    "llama-index-llms-openai-like": llama_index_checks,
}
