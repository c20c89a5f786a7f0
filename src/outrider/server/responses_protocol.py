"""POST /v1/responses: the fields that are understood, and how they become a request of the chat API.

``previous_response_id`` and the items that are looked up are not resolved here, but in ``dialogue.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictInt

from outrider.server.failures import ApiError
from outrider.server.protocol import ChatRequest, Effort, FirstError, Speculation, StreamOptions, Strict
from outrider.server.response_items import MOST_ITEMS, Item, messages_of


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
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_ITEMS), FirstError()]
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
    """A stored response whose conversation goes on. Its instructions do not."""
    conversation: str | dict[str, Any] | None = None
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    """Whether the oldest turns are left out of a conversation that is too long. Otherwise it is refused."""
    include: list[str] = Field(default_factory=list, max_length=16)
    store: bool | None = None
    """Whether the response is stored, for ``previous_response_id`` and to be read again. Default: yes."""
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

    def as_chat(self, items: Sequence[Item]) -> ChatRequest:
        """This request as a request of the chat API that continues the conversation of ``items``."""
        for name, is_used, instead in (
            ("conversation", self.conversation, "continue a stored response with previous_response_id"),
            ("background", self.background, "wait for the answer, or stream it"),
        ):
            if is_used:
                raise ApiError(400, f"{name} is not available here; {instead}", param=name)
        rules = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chat: dict[str, Any] = {"messages": [*rules, *messages_of(items)], "max_completion_tokens": self.max_output_tokens}
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


def _spec(tool: FlatTool) -> dict[str, Any]:
    return tool.model_dump(exclude={"type"}, exclude_none=True)


def _choice(choice: str | NamedTool | AllowedFlatTools) -> Any:
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFlatTools):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice
