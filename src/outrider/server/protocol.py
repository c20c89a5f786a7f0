"""The supported requests of the OpenAI API, field by field, with the additional fields of this server and of vLLM.

Supported fields do what OpenAI's documents say. Fields without a meaning for a local model (``user`` ...) are accepted and
ignored. Any other name is refused, so that nobody relies on a missing option. The value ``null`` is the same as leaving a field
out.
"""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, StrictInt, model_validator

from outrider.server.tool_protocol import AllowedTools, FunctionName, FunctionSpec, Tool, ToolChoice

Tokens = list[StrictInt]
Probability = Annotated[float, Field(ge=0, le=1)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_MOST_IDS = 262_144
_MOST_FIELDS = 256


class FirstError(FailFast):
    """Ends the validation of a list at its first error. An error for each of thousands of items takes seconds."""

    def __hash__(self) -> int:
        return hash(FirstError)


class Strict(BaseModel, ABC):
    """A model that refuses unknown names and treats null as the default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:  # an error for each of thousands takes seconds
            raise ValueError(f"has {len(given)} fields, and there are not so many; send those that are understood")
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def _checked_cut(given: Any) -> Any:
    if isinstance(given, int) and (given == -1 or given >= 1):
        return given
    raise ValueError("must be a number of tokens from 1 on, or -1 for as many as fit")


Truncated = Annotated[int, BeforeValidator(_checked_cut)]
"""How many tokens of a prompt are kept, the last ones. -1 is as many as the model's context holds."""


def at_most(count: int) -> BeforeValidator:
    """Refuse a longer list before its items are validated."""

    def checked(given: Any) -> Any:
        if isinstance(given, list) and len(given) > count:
            raise ValueError(f"has {len(given)} items; at most {count} are taken")
        return given

    return BeforeValidator(checked)


class Speculation(Strict):
    """How this request is drafted. The text does not depend on it."""

    method: str | None = None
    """A method of ``outrider methods``. Default: the server's."""
    max_tokens: int | None = Field(None, ge=0, le=1024)
    """Longest draft length; 0 is plain decoding. The policy may plan less."""
    num_draft_tokens: int | None = Field(None, ge=1, le=64)
    """Fixed draft length of every round, whether it pays or not. Default: the policy decides."""
    trace: bool = False
    """Whether to return every round's tree."""


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk says what was used so far."""


class JsonSchema(Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """Schema of a ``json_object``, as llama.cpp and others take it."""


class StructuredOutputs(Strict):
    """vLLM's field for a grammar. Exactly one kind must be given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    """JSON has the spaces of ``json.dumps`` in any case."""


class Prediction(Strict):
    """OpenAI's Predicted Outputs: text that much of the answer is expected to repeat."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[dict[str, Any]], Field(max_length=1024)]


class SamplingFields(Strict, ABC):
    """Fields that both kinds of request have."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: StrictInt | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: Probability = 1.0
    top_k: int = Field(0, ge=-1, le=1_000_000)
    min_p: Probability = 0.0
    typical_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    min_tokens: int = Field(0, ge=0, le=1_000_000)
    stop_token_ids: Annotated[list[StrictInt], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[StrictInt], FirstError(), Field(min_length=1), at_most(_MOST_IDS)] | None = None
    truncate_prompt_tokens: Truncated | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=4096)] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    prediction: Prediction | None = None
    priority: int = Field(0, ge=0, le=1_000_000)
    """Requests with a larger value wait behind those with a smaller one."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Keeps the prompt out of the prefix cache, so that timing reveals nothing about it."""
    return_token_ids: bool = False
    """Whether choices have the ids of their tokens and of their prompt."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name tokens as ``token_id:17``, so that no two look alike."""
    use_beam_search: Literal[False] = False
    spaces_between_special_tokens: bool | None = None
    speculation: Literal["off", "auto"] | Speculation = "auto"
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


def _one_kind(prompt: Any) -> Any:
    """Check a prompt by hand. A validator that tries one kind after the other reports an error for each of a million items."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")
    kinds = {type(item) for item in prompt}
    if kinds <= {str} or kinds == {int}:
        return prompt
    if kinds == {list} and all(type(token) is int for row in prompt for token in row):
        return prompt
    raise ValueError("must hold texts only, token ids only, or lists of token ids only")


Prompts = Annotated[Any, BeforeValidator(_one_kind)]
"""A text, several, the tokens of one, or those of several."""


def _none_if_false(given: Any) -> Any:
    """False would count as the number 0, which asks for log-probabilities."""
    return None if given is False else given


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: Annotated[int | None, Field(ge=0, le=20), BeforeValidator(_none_if_false)] = None
    add_special_tokens: bool = True
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=128)
    suffix: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=4096)] | None = None


Messages = Annotated[list[ChatMessage], FirstError(), Field(min_length=1), at_most(16_384)]


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None = None
    parallel_tool_calls: bool = True
    functions: Annotated[list[FunctionSpec], Field(max_length=128)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    """Handed to the chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    """Whether the answer goes on with the last message, where that one ends."""
    add_special_tokens: bool = False
    include_reasoning: bool = True
    """Whether the answer shows the model's thinking."""
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: list[Literal["text"]] | None = None
