"""Answers in the formats of the API, whole or in chunks, with statistics of speculation in ``speculation``."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, final

from outrider.codecs.text import TextCodec
from outrider.core.request import Stats, TokenLogprob
from outrider.server.failures import ApiError
from outrider.server.json_text import json_text
from outrider.server.prompt_scores import PromptToken
from outrider.server.protocol import StreamOptions
from outrider.server.queued_request import Order
from outrider.server.token_texts import Offsets, TokenTexts
from outrider.server.transcript import Added


class AnswerBuilder(ABC):
    """Builds the answer to one order from its deltas."""

    def __init__(self, order: Order, *, model: str, codec: TextCodec, options: StreamOptions | None = None) -> None:
        self.order, self.model, self.codec = order, model, codec
        self.options = options or StreamOptions()
        self.texts = TokenTexts(codec, by_id=order.shown.names_ids)
        self.deltas: list[list[Added]] = [[] for _ in order.requests]
        self.num_tokens = 0

    def add(self, delta: Added) -> None:
        self.deltas[delta.choice].append(delta)
        self.num_tokens += len(delta.token_ids)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The complete answer, once all choices are finished."""

    @abstractmethod
    def stream_events(self, delta: Added) -> list[str]:
        """Server-sent events for the newest delta."""

    @abstractmethod
    def closing_events(self) -> list[str]:
        """Events that end a stream."""

    @abstractmethod
    def error_events(self, error: ApiError) -> list[str]:
        """Events that end the stream of a failed request."""

    @property
    def stats(self) -> list[Stats]:
        return [parts[-1].stats for parts in self.deltas if parts and parts[-1].stats]

    @property
    def is_finished(self) -> bool:
        return len(self.stats) == len(self.deltas)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompts that a stored beginning spared, each prompt counted once."""
        firsts = self.deltas[:: self.order.num_each]
        return sum(parts[-1].stats.num_cached for parts in firsts if parts and parts[-1].stats)

    @property
    def num_reasoned(self) -> int:
        """Tokens of the thinking, as the vocabulary writes it."""
        return 0

    def usage(self) -> dict[str, Any]:
        prompt, written = self.order.num_prompt_tokens, self.num_tokens
        accepted, drafted = sum(s.num_accepted for s in self.stats), sum(s.num_drafted for s in self.stats)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        total = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        total |= {"prompt_tokens_details": {"cached_tokens": self.num_cached}}
        return {
            **total,
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoned if self.is_finished else 0, **details},
        }

    def speculation(self) -> dict[str, Any]:
        """Speculation statistics of this request, over all choices."""
        total = {name: sum(vars(stats)[name] for stats in self.stats) for name in asdict(Stats())}
        summed = Stats(**total)
        return {
            **total,
            "method": self.order.method_name,
            "tokens_per_pass": summed.tokens_per_pass,
            "acceptance": summed.acceptance,
            "tokens_per_second": summed.tokens_per_second,
            "seeds": [parts[-1].seed for parts in self.deltas if parts],
        }


class ChoicesAnswer(AnswerBuilder, ABC):
    """An answer that is a list of choices, or chunks of them."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, order: Order, **more: Any) -> None:
        super().__init__(order, **more)
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self) -> dict[str, Any]:
        choices = [{**self._choice(kept, self.deltas[kept]), "index": index} for index, kept in enumerate(self._kept())]
        return {**self._frame(self.kind), "choices": choices, "usage": self.usage(), "speculation": self.speculation()}

    def stream_events(self, delta: Added) -> list[str]:
        return [event(self.chunk(delta))]

    def closing_events(self) -> list[str]:
        last = event({**self._frame(self.chunk_kind), "choices": [], "usage": self.usage()})
        return [*([last] if self.options.include_usage else []), "data: [DONE]\n\n"]

    def error_events(self, error: ApiError) -> list[str]:
        return [event(error.body)]

    def chunk(self, delta: Added) -> dict[str, Any]:
        choice = self._chunk_choice(delta, is_first=len(self.deltas[delta.choice]) == 1)
        frame = {**self._frame(self.chunk_kind), "choices": [choice]}
        if self.options.include_usage or self.options.continuous_usage_stats:
            frame["usage"] = self.usage() if self.options.continuous_usage_stats else None
        if self.is_finished:
            frame["speculation"] = self.speculation()
        return frame

    def _kept(self) -> list[int]:
        """The choices to return: all, or for each prompt those with the highest mean log-probability."""
        best = self.order.num_best
        if best is None:
            return list(range(len(self.deltas)))
        size = self.order.num_each
        groups = [range(first, first + size) for first in range(0, len(self.deltas), size)]
        return [choice for group in groups for choice in sorted(group, key=self._mean_logprob, reverse=True)[:best]]

    def _mean_logprob(self, choice: int) -> float:
        values = [entry.logprob for delta in self.deltas[choice] for entry in delta.logprobs]
        return sum(values) / len(values) if values else 0.0

    @abstractmethod
    def _choice(self, index: int, parts: Sequence[Added]) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, delta: Added, *, is_first: bool) -> dict[str, Any]: ...

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None}

    def _with_more(self, choice: dict[str, Any], parts: Sequence[Added]) -> dict[str, Any]:
        """A choice with the ids of its tokens and its rounds, if they were asked for."""
        more: dict[str, Any] = {}
        if self.order.shown.ids:
            more["token_ids"] = [token for delta in parts for token in delta.token_ids]
            if parts[0] is self.deltas[parts[0].choice][0]:
                more["prompt_token_ids"] = list(self.order.requests[parts[0].choice].prompt_ids)
        if self.order.trace:
            more["rounds"] = [delta.round for delta in parts if delta.round is not None]
        return {**choice, **more}


@final
class CompletionAnswer(ChoicesAnswer):
    """/v1/completions"""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, order: Order, *, echo: bool = False, logprobs: int | None = None, **more: Any) -> None:
        super().__init__(order, **more)
        self.echo, self.logprobs = echo, logprobs
        self._offsets = [self._new_offsets(choice) for choice in range(len(order.requests))]

    def _new_offsets(self, choice: int) -> Offsets:
        lead = self.order.prompts[choice] if self.echo else ""
        return Offsets(self.codec, lead=lead, shows_special=not self.order.requests[choice].params.skip_special_tokens)

    def _choice(self, index: int, parts: Sequence[Added]) -> dict[str, Any]:
        return self._written(index, parts, is_first=True)

    def _chunk_choice(self, delta: Added, *, is_first: bool) -> dict[str, Any]:
        return self._written(delta.choice, [delta], is_first=is_first)

    def _written(self, index: int, parts: Sequence[Added], *, is_first: bool) -> dict[str, Any]:
        lead = self.order.prompts[index] if self.echo and is_first else ""
        scored = next((delta.prompt for delta in parts if delta.prompt is not None), None)
        choice: dict[str, Any] = {"index": index, "text": lead + "".join(delta.text for delta in parts)}
        choice["finish_reason"] = parts[-1].finish_reason
        entries: list[TokenLogprob | None] = [token.scored for token in scored or ()] if self.echo else []
        tokens = [token.token for token in scored or ()] if self.echo else []
        said = [entry for delta in parts for entry in delta.logprobs]
        choice["logprobs"] = self._logprobs(index, [*tokens, *(e.token for e in said)], [*entries, *said])
        if scored is not None and not self.echo:
            choice["prompt_logprobs"] = [prompt_entry(token, self.texts) for token in scored]
        return self._with_more(choice, parts)

    def _logprobs(self, index: int, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        texts = [self.texts.name(token) for token in tokens]
        offsets = self._offsets[index].next(tokens)
        values = [None if entry is None else finite(entry.logprob) for entry in entries]
        tops = [None if entry is None else self._top(entry) for entry in entries]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        return {self.texts.name(token): finite(value) for token, value in entry.top}


def prompt_entry(token: PromptToken, texts: TokenTexts) -> dict[str, Any] | None:
    """A prompt token's score in vLLM's format: token ids with log-probability and rank."""
    if token.scored is None:
        return None
    ranked = {other: (value, rank) for rank, (other, value) in enumerate(token.scored.top, 1)}
    ranked.setdefault(token.token, (token.scored.logprob, token.rank))
    return {
        str(other): {"logprob": finite(value), "rank": rank, "decoded_token": texts.name(other)}
        for other, (value, rank) in ranked.items()
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: -9999, the API's value for "impossible", instead of -infinity."""
    return max(logprob, -9999.0)


def event(body: dict[str, Any]) -> str:
    """A server-sent event without a name."""
    return f"data: {json_text(body)}\n\n"
