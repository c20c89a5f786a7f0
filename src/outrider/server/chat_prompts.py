"""Conversations as the model's chat template writes them, and the parser of what the model answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

from outrider.api import LLM
from outrider.codecs.chat_formats import TAGGED, BareCalls, Reader, TaggedReader, format_of
from outrider.codecs.chat_template import open_ended
from outrider.core.errors import RequestError
from outrider.core.params import SamplingParams
from outrider.server.failures import ApiError
from outrider.server.messages import plain_message
from outrider.server.protocol import ChatRequest
from outrider.server.tools import ToolPlan

TRUNCATED = 4
"""A prompt to be truncated may be at most this many times the context."""
_RULES = ("system", "developer")
"""Roles whose messages at the beginning are kept when turns are left out."""
_RESERVED = frozenset({"messages", "tools"})


@final
class ChatPrompts:
    """The conversations of one model."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def text(self, body: ChatRequest, plan: ToolPlan) -> tuple[str, list[Any]]:
        """The conversation of a request, ready to be continued, with its images."""
        variables = dict(body.chat_template_kwargs or {})
        if _RESERVED & set(variables):
            message = "chat_template_kwargs cannot hold messages or tools; send them as fields"
            raise ApiError(400, message, param="chat_template_kwargs")
        fields = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
        fields |= {"add_generation_prompt": _opens_turn(body)}
        variables = {**{name: value for name, value in fields.items() if value is not None}, **variables}
        if plan.specs:
            variables["tools"] = plan.for_template()
        said, images = self._llm.reading.parted([plain_message(message) for message in body.messages])
        text = self.render(said, variables)
        return open_ended(text, str(said[-1]["content"])) if body.continue_final_message else text, images

    def fitting(self, body: ChatRequest, plan: ToolPlan, most: int) -> ChatRequest:
        """The conversation, shortened to ``most`` tokens by leaving out its oldest turns. A turn begins with a user's message.
        System messages and the last turn stay."""
        rules = next((place for place, one in enumerate(body.messages) if one.role not in _RULES), 0)
        starts = [rules, *(place for place, one in enumerate(body.messages) if place > rules and one.role == "user")]

        def fits(start: int) -> bool:
            return self._fits(_without(body, rules, start), plan, most)

        return _without(body, rules, starts[bisect_left(starts, True, hi=len(starts) - 1, key=fits)])

    def _fits(self, body: ChatRequest, plan: ToolPlan, most: int) -> bool:
        try:
            return len(self._llm.codec.encode_within(self.text(body, plan)[0], most, add_special_tokens=False)) <= most
        except RequestError:
            return False

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """A conversation as the model's template renders it, with a placeholder for each image."""
        messages = self._llm.reading.written(messages)
        codec, size = self._llm.codec, sum(len(str(message["content"])) for message in messages)
        if size > TRUNCATED * (self._llm.target.max_len - 1) * codec.longest_token:
            raise RequestError(f"the messages have {size} characters, far more than the model's context holds; shorten them")
        if codec.chat_template is None:  # a base model: it continues what was said
            return "\n".join(str(message["content"]) for message in messages)
        return codec.chat_text(messages, **variables)

    def reader(self, params: SamplingParams, plan: ToolPlan, text: str) -> tuple[SamplingParams, Callable[[], Reader] | None]:
        """The parser of the answer to ``text``, and the parameters it needs."""
        if plan.must_call:
            return params, BareCalls
        known = None if params.grammar is not None else format_of(self._llm.codec.chat_template)
        if known is None:
            return params, None
        if known is TAGGED and text.rstrip().endswith("<think>"):
            return params, partial(TaggedReader, plan.arguments, thinks=True)
        params = replace(params, skip_special_tokens=False) if known.shows_special else params
        return params, partial(known.new_reader, plan.arguments)


def _without(body: ChatRequest, first: int, end: int) -> ChatRequest:
    """A request without some of its messages."""
    return body.model_copy(update={"messages": [*body.messages[:first], *body.messages[end:]]})


def _opens_turn(body: ChatRequest) -> bool | None:
    """Whether the template opens the assistant's turn; None leaves it to the template's default."""
    if not body.continue_final_message:
        return body.add_generation_prompt
    if body.add_generation_prompt:
        message = "add_generation_prompt opens a new turn and continue_final_message goes on with the last; send one of them"
        raise ApiError(400, message, param="continue_final_message")
    return False
