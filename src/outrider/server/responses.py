"""Answers of /v1/responses: a list of items (a message, calls, thinking), whole or as a stream of named events."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, final

from outrider.codecs.json_calls import Meaning, Piece
from outrider.server.answers import AnswerBuilder
from outrider.server.chat_answers import ChatAnswer
from outrider.server.dialogue import Dialogue
from outrider.server.failures import ApiError
from outrider.server.json_text import json_text
from outrider.server.queued_request import Order
from outrider.server.responses_protocol import ResponsesRequest
from outrider.server.transcript import Added

_KINDS = {Meaning.CONTENT: "message", Meaning.REASONING: "reasoning", Meaning.CALL: "function_call"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(eq=False)
class OutputItem:
    """One item of the output: a message, a tool call or reasoning."""

    kind: str
    id: str
    name: str = ""
    text: str = ""
    """Text of the message or of the reasoning; for a call, its arguments."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of the message's tokens, if they were asked for."""

    def as_json(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, "call_id": f"call_{self.id[3:]}", "name": self.name, "arguments": self.text}
        content = [self.part()] if status == "completed" or self.text else []
        return (
            {**head, "role": "assistant", "content": content}
            if self.kind == "message"
            else {
                **head,
                "summary": [],
                "content": content,
            }
        )

    def part(self) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self.logprobs} if self.kind == "message" else {}
        return {"type": _PARTS[self.kind], "text": self.text, **more}


@final
class ResponseAnswer(AnswerBuilder):
    """Reads an answer as the chat API does and writes it as items."""

    def __init__(self, order: Order, *, asked: ResponsesRequest, talk: Dialogue, **more: Any) -> None:
        super().__init__(order, **more)
        self._asked, self._talk, self._chat = asked, talk, ChatAnswer(order, **more)
        self.id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.items: list[OutputItem] = []
        self._num_events, self._is_begun = 0, False
        self._pieces: list[Piece] = []
        self._scored: list[dict[str, Any]] = []
        """Log-probabilities of the tokens of the message so far."""
        self._num_scored = 0

    def add(self, delta: Added) -> None:
        super().add(delta)
        self._chat.add(delta)
        self._pieces = [piece for piece in self._chat.latest if piece.text]
        if any(piece.meaning is Meaning.CONTENT for piece in self._pieces):
            self._scored += [self._chat.entry(entry) for entry in delta.logprobs]

    @property
    def num_reasoned(self) -> int:
        return self._chat.num_reasoned

    def whole(self) -> dict[str, Any]:
        self._read_all()
        return self._talk.keep(self._response())

    def stream_events(self, delta: Added) -> list[str]:
        """The events of a delta."""
        events = [] if self._is_begun else [self._event(f"response.{name}", response=self._response()) for name in _BEGIN]
        self._is_begun = True
        for piece in self._pieces:
            events += self._take(piece)
        if delta.finish_reason is not None:
            events += self._take(Piece(Meaning.CONTENT, "")) if not self.items else []
            events += self._close(len(self.items) - 1)
        return events

    def closing_events(self) -> list[str]:
        return [self._event(f"response.{self._status}", response=self._talk.keep(self._response()))]

    def error_events(self, error: ApiError) -> list[str]:
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def _read_all(self) -> None:
        said = self._chat.messages[0]
        made = [("reasoning", "", said.reasoning), ("message", "", said.content if said.content or not said.calls else "")]
        made += [("function_call", name, arguments) for name, arguments in said.calls]
        wanted = [one for one in made if one[2] or one[0] == "function_call" or (one[0] == "message" and not said.calls)]
        self.items = [
            OutputItem(kind, self._number(kind, index), name, text) for index, (kind, name, text) in enumerate(wanted)
        ]
        for item in self.items:
            item.logprobs = self._scored if item.kind == "message" else []

    def _take(self, piece: Piece) -> list[str]:
        """Append a piece to the open item, or close that one and open another."""
        kind = "function_call" if piece.meaning is Meaning.ARGUMENTS else _KINDS[piece.meaning]
        events: list[str] = []
        if not self.items or self.items[-1].kind != kind or piece.meaning is Meaning.CALL:
            events += self._close(len(self.items) - 1) if self.items else []
            self.items.append(OutputItem(kind, self._number(kind, len(self.items))))
            if piece.meaning is Meaning.CALL:
                self.items[-1].name = piece.text
            events += self._open(len(self.items) - 1)
        if piece.meaning is Meaning.CALL:
            return events
        item = self.items[-1]
        item.text += piece.text
        more: dict[str, Any] = {}
        if kind == "message":
            more["logprobs"], self._num_scored = self._scored[self._num_scored :], len(self._scored)
            item.logprobs += more["logprobs"]
        return [*events, self._about(f"response.{_STREAMS[kind]}.delta", len(self.items) - 1, delta=piece.text, **more)]

    def _open(self, index: int) -> list[str]:
        item = self.items[index]
        events = [self._event("response.output_item.added", output_index=index, item=item.as_json("in_progress"))]
        if item.kind in _PARTS:
            events.append(self._about("response.content_part.added", index, part=item.part()))
        return events

    def _close(self, index: int) -> list[str]:
        item = self.items[index]
        if item.kind == "function_call":
            done = [self._about(f"response.{_STREAMS[item.kind]}.done", index, name=item.name, arguments=item.text)]
        else:
            done = [self._about(f"response.{_STREAMS[item.kind]}.done", index, text=item.text)]
            done.append(self._about("response.content_part.done", index, part=item.part()))
        return [*done, self._event("response.output_item.done", output_index=index, item=item.as_json("completed"))]

    def _about(self, name: str, index: int, /, **more: Any) -> str:
        """The fields of an event about an item, and about its part if it has one."""
        item = self.items[index]
        where: dict[str, Any] = {"item_id": item.id, "output_index": index}
        where |= {"content_index": 0} if item.kind in _PARTS else {}
        where |= {"logprobs": item.logprobs} if name == "response.output_text.done" else {}
        return self._event(name, **where, **more)

    def _event(self, name: str, /, **fields: Any) -> str:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {name}\ndata: {json_text(body)}\n\n"

    def _number(self, kind: str, index: int) -> str:
        return f"{_PREFIXES[kind]}_{self.id[5:]}_{index}"

    @property
    def _status(self) -> str:
        if not self.is_finished:
            return "in_progress"
        return "incomplete" if self.deltas[0][-1].finish_reason == "length" else "completed"

    def _response(self) -> dict[str, Any]:
        asked, status = self._asked, self._status
        is_done = self.is_finished
        told = asked.model_dump(
            include={"instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "top_p", "truncation", "user"}
        )
        told |= {"tools": [{"strict": None, **tool.model_dump()} for tool in asked.tools], "metadata": asked.metadata or {}}
        choice = asked.tool_choice if isinstance(asked.tool_choice, str) else asked.tool_choice.model_dump()
        effort = asked.reasoning.effort if asked.reasoning else None
        form = asked.text.format.model_dump(by_alias=True, exclude_none=True) if asked.text and asked.text.format else None
        return {
            **told,
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [item.as_json("completed") for item in self.items] if is_done else [],
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": self._talk.is_kept,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": choice,
            "usage": self._tokens() if is_done else None,
            **({"speculation": self.speculation()} if is_done else {}),
        }

    def _tokens(self) -> dict[str, Any]:
        used = self.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": used["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": used["total_tokens"],
        }


_BEGIN = ("created", "in_progress")
_STREAMS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
