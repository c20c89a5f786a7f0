"""The requests of the OpenAI API that are understood, field by field, and what is ours beside them.

Fields that mean something here do what they say; those that mean nothing to a local model (``user`` ...) are accepted; any
other name is refused, so that nobody relies on an option that is not there.
"""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

Tokens = list[StrictInt]
Probability = Annotated[float, Field(ge=0, le=1)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Strict(BaseModel, ABC):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Speculation(_Strict):
    """How this request is to be sped up. The text does not depend on it."""

    method: str | None = None
    """A row of ``outrider methods``; the server's own if not given."""
    max_tokens: int | None = Field(None, ge=0, le=1024)
    """Most guesses along a path; 0 is plain decoding. The policy decides below it."""
    trace: bool = False
    """Send every round's tree along."""


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class FunctionSpec(BaseModel):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"] = "function"
    function: FunctionSpec


class FunctionName(_Strict):
    name: str


class ToolChoice(_Strict):
    type: Literal["function"] = "function"
    function: FunctionName


class SamplingFields(_Strict, ABC):
    """What both kinds of request share."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: StrictInt | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=1_000_000)
    min_p: Probability = 0.0
    typical_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    min_tokens: int = Field(0, ge=0, le=1_000_000)
    stop_token_ids: Annotated[list[StrictInt], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    speculation: Literal["off", "auto"] | Speculation = "auto"
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | Tokens | list[str] | list[Tokens]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
