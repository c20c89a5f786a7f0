"""POST /v1/responses: the fields that are understood, and how they become a request of the chat API.

Nothing is stored here, so a response cannot be continued by its number: send the whole conversation as ``input``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictInt

from outrider.core.errors import nearest
from outrider.server.failures import ApiError
from outrider.server.messages import has_images, joined_text
from outrider.server.protocol import ChatRequest, Effort, FirstError, Speculation, StreamOptions, Strict


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FlatTool(BaseModel):
    """A function in the format of this API, without an enclosing object."""

    type: Literal["function"] = "function"
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Strict):
    type: Literal["function"]
    name: str


class AllowedFlatTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=16_384), FirstError()]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: StrictInt | None = None
    tools: list[FlatTool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedFlatTools = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    include: list[str] = Field(default_factory=list, max_length=16)
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: int | None = Field(None, ge=1)
    """Counts tools that a server runs by itself. There are none here."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """Alternatives per token of the text, as ``message.output_text.logprobs`` of ``include`` asks for its tokens."""
    speculation: Literal["off", "auto"] | Speculation = "auto"

    def as_chat(self) -> ChatRequest:
        """This request as a request of the chat API."""
        for name, is_used in (
            ("previous_response_id", self.previous_response_id),
            ("conversation", self.conversation),
            ("background", self.background),
        ):
            if is_used:
                message = f"{name} needs responses that are stored, and none are here; send the whole conversation as input"
                raise ApiError(400, message, param=name)
        chat: dict[str, Any] = {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        chat |= self.model_dump(include={"model", "temperature", "top_p", "seed", "stream", "parallel_tool_calls"})
        chat |= {"tools": [{"type": "function", "function": _spec(tool)} for tool in self.tools] or None}
        chat |= {"tool_choice": _choice(self.tool_choice) if self.tools else None, "response_format": self._format()}
        is_scored = self.top_logprobs is not None or _LOGPROBS in self.include
        chat |= {"logprobs": is_scored, "top_logprobs": self.top_logprobs}
        chat |= {"reasoning_effort": self.reasoning.effort if self.reasoning else None, "speculation": self.speculation}
        return ChatRequest.model_validate(chat)

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        if wanted.schema_ is None:
            raise ApiError(400, "text.format of type json_schema lacks the schema; give the field schema", param="text")
        return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}

    def _messages(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*said, {"role": "user", "content": self.input}]
        for item in self.input:
            message = _message(item)
            if said and _belongs_to(said[-1], message):
                said[-1] = _one_turn(said[-1], message)
            else:
                said.append(message)
        return said


def _spec(tool: FlatTool) -> dict[str, Any]:
    return tool.model_dump(exclude={"type"}, exclude_none=True)


def _choice(choice: str | NamedTool | AllowedFlatTools) -> Any:
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFlatTools):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
"""Types of items of ``input`` that are understood."""


def _message(item: dict[str, Any]) -> dict[str, Any]:
    """The message of an input item."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _reasoning(item)}
    if kind == "function_call":
        function = {"name": str(item.get("name", "")), "arguments": str(item.get("arguments", "{}"))}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output", "")
        text = output if isinstance(output, str) else joined_text(_parts(output), "input")
        return {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text}
    if kind != "message":
        message = f"input holds an item of type {str(kind)[:64]!r}; {nearest(str(kind), _ITEMS)}"
        raise ApiError(400, message, param="input")
    content = item.get("content", "")
    text = content if isinstance(content, str) or has_images(_parts(content)) else joined_text(_parts(content), "input")
    return {"role": item.get("role", "user"), "content": text}


def _reasoning(item: dict[str, Any]) -> str:
    """The thinking of an earlier turn, which templates may show to the model again."""
    parts = item.get("content") or []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ""


def _belongs_to(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether both are of one turn: thinking comes before what it led to, and calls are made with what is said."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    is_thought = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
    return is_thought or "tool_calls" in message


def _one_turn(last: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
    content = last["content"] or message["content"]
    return {**last, **message, "content": content, **({"tool_calls": calls} if calls else {})}


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError(400, "the content of an item of input is not valid; send a text or a list of parts", param="input")
    return content
