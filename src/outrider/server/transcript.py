"""One choice while it is generated: text that is safe to show, its tokens, and the origin of each token.

Text that could still become a stop string is held back, so nothing that was sent is ever taken back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from outrider.codecs.text import TextCodec
from outrider.core.report import Progress
from outrider.core.request import FinishReason, Request, RequestState, Stats, TokenLogprob
from outrider.core.trace import Round
from outrider.server.prompt_scores import PromptToken
from outrider.server.spans import ToldRound


@dataclass(frozen=True, eq=False)
class Added:
    """Additions of one round to a choice. Made on the engine's thread, read on the server's."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprob]
    round: dict[str, Any] | None = None
    """The round's tree as text, if it was asked for."""
    finish_reason: str | None = None
    stats: Stats | None = None
    """The request's statistics, in the last addition only."""
    seed: int = 0
    prompt: list[PromptToken] | None = None
    """Scores of the prompt, if asked for, in the first addition only."""
    told: ToldRound | None = None
    """The round in numbers, for the request's span."""


@dataclass(frozen=True)
class SharedPass:
    """The target pass that a round was part of."""

    number: int
    """Number of the pass. Rounds with the same number shared it."""
    num_rows: int
    """Requests in it."""
    num_nodes: int
    """Nodes of all their trees."""


@final
@dataclass(eq=False)
class Transcript:
    """The part of a choice that was sent so far."""

    choice: int
    request: Request
    codec: TextCodec
    traced: bool = False
    num_shown: int = 0
    num_logprobs: int = 0
    prompt: list[PromptToken] | None = None
    """Scores of the prompt that are not sent yet."""

    def __post_init__(self) -> None:
        self._pieces = self.codec.new_stream(self.request.prompt_ids, skip_special_tokens=False)() if self.traced else None

    def advance(self, step: Progress, shared: SharedPass) -> Added:
        state = step.state
        finished = state.is_finished
        text = self._whole(state) if finished else state.text[: len(state.text) - _num_held_back(state)]
        delta, self.num_shown = text[self.num_shown :], max(self.num_shown, len(text))
        logprobs, self.num_logprobs = state.logprobs[self.num_logprobs :], len(state.logprobs)
        seen = self._described(step.trace, shared) if self.traced else None
        reason = state.finish_reason.value if state.finish_reason else None
        stats = state.stats if finished else None
        prompt, self.prompt = self.prompt, None
        told = self._told(step, shared)
        return Added(self.choice, delta, step.new_tokens, logprobs, seen, reason, stats, state.seed, prompt, told)

    def only_scored(self) -> Added:
        """The answer to a request for prompt scores without text."""
        return Added(self.choice, "", (), [], finish_reason=FinishReason.LENGTH.value, stats=Stats(), prompt=self.prompt)

    def _whole(self, state: RequestState) -> str:
        """The final text, cut at a stop string and without the token that ended it."""
        if isinstance(state.stop_match, str):
            return state.text
        ids = state.output_ids[:-1] if state.finish_reason is FinishReason.STOP else state.output_ids
        skip = state.params.skip_special_tokens
        return self.codec.decode(ids, prompt_ids=state.request.prompt_ids, skip_special_tokens=skip)

    def _told(self, step: Progress, shared: SharedPass) -> ToldRound:
        report, row = step.report, step.row
        counts = report.drafted[row], report.accepted[row], len(step.new_tokens)
        reason = report.reason.code.value if report.reason else ""
        return ToldRound(self.choice, time.perf_counter(), report.seconds, shared.number, *counts, reason)

    def _described(self, seen: Round, shared: SharedPass) -> dict[str, Any]:
        assert self._pieces is not None
        pieces = [{"text": self._pieces.push(t), "origin": o.value} for t, o in zip(seen.emitted, seen.origins, strict=True)]
        words = [self.codec.token_text(token) for token in seen.tokens]
        return {**seen.to_json(), "words": words, "pieces": pieces, "shared": asdict(shared)}


def _num_held_back(state: RequestState) -> int:
    """Length of the longest suffix of the text that begins a stop string."""
    text = state.text
    ends = (size for stop in state.params.stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(ends, default=0)
