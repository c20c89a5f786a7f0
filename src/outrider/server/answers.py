"""Answers in the shapes of the API: whole, or chunk by chunk, with what speculation did in ``speculation``."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, final

from outrider.codecs.text import TextCodec
from outrider.core.request import Stats, TokenLogprob
from outrider.server.intake import Order
from outrider.server.transcript import Added


class Answer(ABC):
    """Builds the answer to one order from its deltas."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, order: Order, *, model: str, codec: TextCodec, include_usage: bool = False) -> None:
        self.order, self.model, self.codec = order, model, codec
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.include_usage = include_usage
        self.deltas: list[list[Added]] = [[] for _ in order.requests]

    def add(self, delta: Added) -> None:
        self.deltas[delta.choice].append(delta)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index, parts) for index, parts in enumerate(self.deltas)]
        return {**self._frame(self.kind), "choices": choices, "usage": self.usage(), "speculation": self.speculation()}

    def chunk(self, delta: Added) -> dict[str, Any]:
        choice = self._chunk_choice(delta, is_first=len(self.deltas[delta.choice]) == 1)
        frame = {**self._frame(self.chunk_kind), "choices": [choice]}
        if self.is_finished:
            frame["speculation"] = self.speculation()
        return frame

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._frame(self.chunk_kind), "choices": [], "usage": self.usage()}

    @property
    def stats(self) -> list[Stats]:
        return [parts[-1].stats for parts in self.deltas if parts and parts[-1].stats]

    @property
    def is_finished(self) -> bool:
        return len(self.stats) == len(self.deltas)

    @property
    def num_tokens(self) -> int:
        return sum(delta.num_tokens for parts in self.deltas for delta in parts)

    def usage(self) -> dict[str, Any]:
        prompt, written = self.order.num_prompt_tokens, self.num_tokens
        accepted, drafted = sum(s.num_accepted for s in self.stats), sum(s.num_drafted for s in self.stats)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        total = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        return {**total, "completion_tokens_details": details}

    def speculation(self) -> dict[str, Any]:
        """What speculation did for this request, all choices together."""
        total = {name: sum(vars(stats)[name] for stats in self.stats) for name in asdict(Stats())}
        summed = Stats(**total)
        return {
            **total,
            "method": self.order.lane or None,
            "tokens_per_pass": summed.tokens_per_pass,
            "acceptance": summed.acceptance,
            "tokens_per_second": summed.tokens_per_second,
            "seeds": [parts[-1].seed for parts in self.deltas if parts],
        }

    @abstractmethod
    def _choice(self, index: int, parts: Sequence[Added]) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, delta: Added, *, is_first: bool) -> dict[str, Any]: ...

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None}

    def _with_rounds(self, choice: dict[str, Any], parts: Sequence[Added]) -> dict[str, Any]:
        rounds = [delta.round for delta in parts if delta.round is not None]
        return {**choice, "rounds": rounds} if self.order.trace else choice


@final
class CompletionAnswer(Answer):
    """/v1/completions"""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, order: Order, *, echo: bool = False, **more: Any) -> None:
        super().__init__(order, **more)
        self.echo = echo

    def _choice(self, index: int, parts: Sequence[Added]) -> dict[str, Any]:
        text = (self.order.prompts[index] if self.echo else "") + "".join(delta.text for delta in parts)
        choice = {"index": index, "text": text, "finish_reason": parts[-1].finish_reason}
        choice["logprobs"] = self._logprobs([entry for delta in parts for entry in delta.logprobs], index)
        return self._with_rounds(choice, parts)

    def _chunk_choice(self, delta: Added, *, is_first: bool) -> dict[str, Any]:
        choice = self._choice(delta.choice, [delta])
        return choice if is_first or not self.echo else {**choice, "text": delta.text}

    def _logprobs(self, entries: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        if self.order.requests[index].params.logprobs is None:
            return None
        texts = [self.codec.token_text(entry.token) for entry in entries]
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
        tops = [{self.codec.token_text(token): _finite(value) for token, value in entry.top} for entry in entries]
        values = [_finite(entry.logprob) for entry in entries]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


@final
class ChatAnswer(Answer):
    """/v1/chat/completions"""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, parts: Sequence[Added]) -> dict[str, Any]:
        text = "".join(delta.text for delta in parts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.order.function is not None:
            message |= {"content": None, "tool_calls": [self._call(index, text, is_first=True)]}
        logprobs = self._logprobs([entry for delta in parts for entry in delta.logprobs], index)
        choice = {"index": index, "message": message, "finish_reason": parts[-1].finish_reason, "logprobs": logprobs}
        return self._with_rounds(choice, parts)

    def _chunk_choice(self, delta: Added, *, is_first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if self.order.function is None:
            content["content"] = delta.text
        else:
            content["tool_calls"] = [{"index": 0, **self._call(delta.choice, delta.text, is_first=is_first)}]
        choice = {"index": delta.choice, "delta": content, "finish_reason": delta.finish_reason}
        choice["logprobs"] = self._logprobs(delta.logprobs, delta.choice)
        return self._with_rounds(choice, [delta])

    def _call(self, index: int, arguments: str, *, is_first: bool) -> dict[str, Any]:
        if not is_first:
            return {"function": {"arguments": arguments}}
        function = {"name": self.order.function, "arguments": arguments}
        return {"id": f"call_{self.id[-16:]}_{index}", "type": "function", "function": function}

    def _logprobs(self, entries: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        if self.order.requests[index].params.logprobs is None:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._one(token, value) for token, value in entry.top]
        return {**self._one(entry.token, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.codec.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8"))}


def _finite(logprob: float) -> float:
    """The API's word for "impossible" is -9999: JSON has no infinity."""
    return max(logprob, -9999.0)
