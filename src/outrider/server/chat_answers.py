"""Answers of /v1/chat/completions: text, thinking and tool calls, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from outrider.codecs.chat_formats import Reader
from outrider.codecs.json_calls import Meaning, Piece
from outrider.core.request import TokenLogprob
from outrider.server.answers import ChoicesAnswer, finite, prompt_entry
from outrider.server.queued_request import Order
from outrider.server.transcript import Added


@dataclass(eq=False)
class Message:
    """The content of a choice so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments of tool calls."""

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.meaning is Meaning.CALL:
                self.calls.append((piece.text, ""))
            elif piece.meaning is Meaning.ARGUMENTS and self.calls:
                self.calls[-1] = self.calls[-1][0], self.calls[-1][1] + piece.text
            elif piece.meaning is Meaning.REASONING:
                self.reasoning += piece.text
            else:
                self.content += piece.text


@final
class ChatAnswer(ChoicesAnswer):
    """/v1/chat/completions"""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, order: Order, **more: Any) -> None:
        super().__init__(order, **more)
        self._readers: list[Reader | None] = [order.new_reader() if order.new_reader else None for _ in order.requests]
        self.messages = [Message() for _ in order.requests]
        self._latest: list[Piece] = []

    def add(self, delta: Added) -> None:
        super().add(delta)
        self._latest = self.read(delta)
        self.messages[delta.choice].add(self._latest)

    def read(self, delta: Added) -> list[Piece]:
        """Parse a delta into text, thinking and tool calls."""
        is_first = len(self.deltas[delta.choice]) == 1
        if self.order.function is not None:
            return [*([Piece(Meaning.CALL, self.order.function)] if is_first else []), Piece(Meaning.ARGUMENTS, delta.text)]
        reader = self._readers[delta.choice]
        if reader is None:
            return [Piece(Meaning.CONTENT, delta.text)]
        return [*reader.push(delta.text), *(reader.end() if delta.finish_reason else [])]

    @property
    def num_reasoned(self) -> int:
        said = [message.reasoning for message in self.messages if message.reasoning]
        return sum(len(self.codec.encode(text, add_special_tokens=False)) for text in said)

    @property
    def latest(self) -> list[Piece]:
        """The parsed pieces of the newest delta."""
        return self._latest

    def call_id(self, choice: int, call: int) -> str:
        return f"call_{self.id[-16:]}_{choice}_{call}"

    def _choice(self, index: int, parts: Sequence[Added]) -> dict[str, Any]:
        said = self.messages[index]
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning and self.order.shown.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message |= {"content": said.content or None, **self._calls(index, said.calls)}
        logprobs = self._logprobs([entry for delta in parts for entry in delta.logprobs], index)
        choice = {"index": index, "message": message, "finish_reason": self._reason(parts[-1]), "logprobs": logprobs}
        return self._with_scores(self._with_more(choice, parts), parts)

    def _calls(self, index: int, calls: Sequence[tuple[str, str]]) -> dict[str, Any]:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        if self.order.is_legacy:
            return {"function_call": functions[0]}
        ids = [self.call_id(index, call) for call in range(len(calls))]
        return {"tool_calls": [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]}

    def _chunk_choice(self, delta: Added, *, is_first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        content |= self._delta(delta.choice)
        choice = {"index": delta.choice, "delta": content, "finish_reason": self._reason(delta)}
        choice["logprobs"] = self._logprobs(delta.logprobs, delta.choice)
        return self._with_scores(self._with_more(choice, [delta]), [delta])

    def _delta(self, choice: int) -> dict[str, Any]:
        """The newest pieces as a delta of a stream."""
        added: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        number = len(self.messages[choice].calls) - sum(piece.meaning is Meaning.CALL for piece in self._latest) - 1
        for piece in self._latest:
            if piece.meaning is Meaning.CONTENT:
                added["content"] = added.get("content", "") + piece.text
            elif piece.meaning is Meaning.REASONING:
                said = piece.text if self.order.shown.reasoning else ""
                added |= {"reasoning_content": added.get("reasoning_content", "") + said} if said else {}
            elif piece.meaning is Meaning.CALL:
                number += 1
                head = {"index": number, "id": self.call_id(choice, number), "type": "function"}
                calls.append({**head, "function": {"name": piece.text, "arguments": ""}})
            elif calls and calls[-1]["index"] == number:
                calls[-1]["function"]["arguments"] += piece.text
            else:
                calls.append({"index": max(0, number), "function": {"arguments": piece.text}})
        if not calls:
            return added
        return {**added, **({"function_call": calls[0]["function"]} if self.order.is_legacy else {"tool_calls": calls})}

    def _reason(self, last: Added) -> str | None:
        """The finish reason: ``tool_calls`` where a tool was called, the usual one if the request had named it."""
        is_named = self.order.function is not None and not self.order.is_required
        if last.finish_reason != "stop" or is_named or not self.messages[last.choice].calls:
            return last.finish_reason
        return "function_call" if self.order.is_legacy else "tool_calls"

    def _with_scores(self, choice: dict[str, Any], parts: Sequence[Added]) -> dict[str, Any]:
        scored = next((delta.prompt for delta in parts if delta.prompt is not None), None)
        return choice if scored is None else {**choice, "prompt_logprobs": [prompt_entry(t, self.texts) for t in scored]}

    def _logprobs(self, entries: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        if self.order.requests[index].params.logprobs is None:
            return None
        return {"content": [self.entry(entry) for entry in entries], "refusal": None}

    def entry(self, entry: TokenLogprob) -> dict[str, Any]:
        """A token's log-probability with its alternatives."""
        top = [self._one(token, value) for token, value in entry.top]
        return {**self._one(entry.token, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.texts.name(token), "logprob": finite(logprob), "bytes": self.texts.bytes_of(token)}
