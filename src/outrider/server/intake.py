"""From requests of the API to requests of the engine: prompts, sampling parameters, grammar, method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, final

from outrider.api import LLM
from outrider.core.errors import OutriderError, RequestError
from outrider.core.params import Grammar, SamplingParams
from outrider.core.request import Request
from outrider.methods import METHODS
from outrider.server.failures import ApiError
from outrider.server.protocol import ChatMessage, ChatRequest, CompletionRequest, SamplingFields, Speculation, ToolChoice
from outrider.server.settings import ServerSettings

DEFAULT_LANE = ""
"""The method the server was started with."""
_COMPLETION_TOKENS = 16
"""What the API gives a completion that names no limit."""


@dataclass(frozen=True, eq=False)
class Order:
    """A request of the API as the worker takes it: one engine request per choice."""

    requests: list[Request]
    prompts: list[str]
    """Text of each choice's prompt, if it is to be echoed."""
    lane: str
    max_draft: int | None
    trace: bool
    function: str | None = None
    """The tool that was named: its arguments are what is generated."""
    num_prompt_tokens: int = 0
    """Of all prompts, each counted once."""


@final
class Intake:
    """Reads requests for one model."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._lock = Lock()
        self._grammar = lru_cache(maxsize=64)(self._compile)

    def completion(self, body: CompletionRequest) -> Order:
        for name, is_used in (("suffix", body.suffix), ("best_of", body.best_of not in (None, body.n))):
            if is_used:
                raise ApiError(400, f"{name} is not supported; leave it out", param=name)
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported; leave one of them out", param="echo")
        prompts = _prompts(body.prompt)
        tokens = self._max_tokens(body.max_tokens or _COMPLETION_TOKENS)
        params = self._params(body, max_tokens=tokens, logprobs=body.logprobs, schema=_schema_of(body))
        return self._order(body, prompts, params)

    def chat(self, body: ChatRequest) -> Order:
        function = _named_function(body)
        schema = function[1] if function else _schema_of(body)
        asked = body.max_completion_tokens or body.max_tokens or self._settings.default_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = self._params(body, max_tokens=self._max_tokens(asked), logprobs=logprobs, schema=schema)
        return self._order(body, [self._encode_chat(body)], params, function=function[0] if function else None)

    def _order(
        self, body: SamplingFields, prompts: Sequence[Any], params: SamplingParams, *, function: str | None = None
    ) -> Order:
        count = len(prompts) * body.n
        if count > self._settings.max_choices:
            message = f"{len(prompts)} prompts times n = {body.n} make {count} choices; at most {self._settings.max_choices}"
            raise ApiError(400, message, param="n")
        encoded = [self._llm.codec.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        spread = [ids for ids in encoded for _ in range(body.n)]
        each = [_with_seed(params, index % body.n) for index in range(count)]
        requests = self._llm.requests(spread, each, streaming=True)
        lane, max_draft, trace = _speculation_of(body)
        shown = self._echoed(prompts, body.n) if isinstance(body, CompletionRequest) and body.echo else []
        return Order(requests, shown, lane, max_draft, trace, function, sum(map(len, encoded)))

    def _echoed(self, prompts: Sequence[Any], n: int) -> list[str]:
        texts = [prompt if isinstance(prompt, str) else self._llm.codec.decode(prompt) for prompt in prompts]
        return [text for text in texts for _ in range(n)]

    def _params(
        self, body: SamplingFields, *, max_tokens: int, logprobs: int | None, schema: Mapping[str, Any] | None
    ) -> SamplingParams:
        same = (
            "temperature top_p min_p typical_p presence_penalty frequency_penalty repetition_penalty min_tokens ignore_eos "
            "skip_special_tokens seed"
        ).split()
        fields = body.model_dump(include=set(same))
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        return SamplingParams(
            **fields,
            max_tokens=max_tokens,
            top_k=max(0, body.top_k),
            stop=tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=_bias_of(body.logit_bias or {}),
            logprobs=None if logprobs is None else min(logprobs, self._llm.target.vocab_size),
            grammar=None if schema is None else self._grammar(json.dumps(schema)),
        )

    def _compile(self, schema: str) -> Grammar:
        with self._lock:
            try:
                return self._llm.grammar(json_schema=schema)
            except OutriderError as error:
                raise ApiError(400, str(error), param="response_format") from None

    def _max_tokens(self, asked: int) -> int:
        if asked > self._settings.max_tokens:
            message = f"max_tokens = {asked} is more than this server allows; use at most {self._settings.max_tokens}"
            raise ApiError(400, message, param="max_tokens")
        return asked

    def _encode_chat(self, body: ChatRequest) -> Any:
        messages = [_plain_message(message) for message in body.messages]
        if self._llm.codec.chat_template is None:  # a base model: it continues what was said
            return "\n".join(message["content"] for message in messages)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        variables = {"tools": tools} if tools and body.tool_choice != "none" else {}
        return self._llm.codec.encode_chat(messages, **variables)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty; give text or token ids", param="prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _schema_of(body: SamplingFields) -> Mapping[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise ApiError(400, "response_format of type json_schema needs the field json_schema", param="response_format")
    return wanted.json_schema.schema_


def _named_function(body: ChatRequest) -> tuple[str, Mapping[str, Any]] | None:
    """The one tool that has to be called, with the schema of its arguments."""
    tools = {tool.function.name: tool.function for tool in body.tools or ()}
    if isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
    elif body.tool_choice == "required" and len(tools) == 1:
        name = next(iter(tools))
    elif body.tool_choice == "required":
        raise ApiError(400, "tool_choice 'required' needs exactly one tool; name one, or use 'auto'", param="tool_choice")
    else:
        return None
    if name not in tools:
        raise ApiError(400, f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return name, tools[name].parameters or {"type": "object"}


def _speculation_of(body: SamplingFields) -> tuple[str, int | None, bool]:
    """Lane, most guesses, whether rounds are sent along."""
    wanted = body.speculation
    if not isinstance(wanted, Speculation):
        return DEFAULT_LANE, 0 if wanted == "off" else None, False
    if wanted.method is not None:
        METHODS[wanted.method]  # an unknown name is refused with the nearest one
    return wanted.method or DEFAULT_LANE, wanted.max_tokens, wanted.trace


def _with_seed(params: SamplingParams, offset: int) -> SamplingParams:
    """Choices of one request have seeds of their own."""
    if params.seed is None or offset == 0:
        return params
    return SamplingParams(**{**vars(params), "seed": (params.seed + offset) % 2**63})


def _bias_of(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise ApiError(400, "logit_bias maps token ids to numbers; one of its keys is no id", param="logit_bias") from None


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Content as one text: parts are joined, none is empty."""
    content = message.content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise ApiError(400, "only text parts are understood in a message's content", param="messages")
        content = "".join(str(text) for text in texts)
    return {**message.model_dump(exclude_none=True), "content": content or ""}


def refusal(error: RequestError | OutriderError) -> ApiError:
    """An error of the engine's own, in the words of the API."""
    return ApiError(400, str(error))
