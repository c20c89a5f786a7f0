"""What the Python API returns: finished requests, pieces of running ones, and the texts of a beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.codecs.text import TextCodec
from outrider.core.request import FinishReason, Origin, RequestState, Stats, TokenLogprob
from outrider.core.trace import Round
from outrider.engine.beam import BeamResult


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """A finished request."""

    prompt_token_ids: list[int]
    """The tokens of the prompt."""
    text: str
    """The text that was generated."""
    token_ids: list[int]
    """The tokens of the text."""
    finish_reason: str
    """"stop" or "length"."""
    stats: Stats
    """Statistics of the request: passes, guesses, seconds."""
    origins: list[Origin]
    """Where each token came from."""
    logprobs: list[TokenLogprob] | None
    """Log-probabilities of the emitted tokens, if they were asked for."""
    seed: int
    """The seed that gives the same text again."""
    is_invariant: bool = False
    """Whether scores were the same bits whatever shared a pass. If so, this is exactly the text of plain decoding. If not, a
    choice between two almost equally likely tokens may differ (docs/lossless.md)."""
    trace: list[Round] = field(default_factory=list)
    """Every round of the request, if a trace was asked for."""


@dataclass(frozen=True, eq=False)
class StreamChunk:
    """The additions of one round to one request."""

    index: int
    """Index of the prompt."""
    text: str
    """The new text."""
    token_ids: list[int]
    """The new tokens."""
    origins: list[Origin]
    """Where each of the new tokens came from."""
    output: RequestOutput | None
    """The whole result, on a request's last chunk."""


@dataclass(frozen=True, eq=False)
class BeamOutput:
    """One of the best texts of a beam search."""

    text: str
    token_ids: list[int]
    score: float
    """Log-probability over length ^ length_penalty."""
    num_passes: int
    """Target passes of the whole search."""
    num_levels: int
    """Number of levels searched; plain search needs one pass per level."""


def output_of(codec: TextCodec, state: RequestState, rounds: list[Round], *, is_invariant: bool) -> RequestOutput:
    """The output of a finished request: its text, without the token that ended it."""
    assert state.finish_reason is not None
    text = state.text
    if not isinstance(state.stop_match, str):
        ended = state.finish_reason is FinishReason.STOP
        ids = state.output_ids[:-1] if ended else state.output_ids
        skip = state.params.skip_special_tokens
        text = codec.decode(ids, prompt_ids=state.request.prompt_ids, skip_special_tokens=skip)
    return RequestOutput(
        prompt_token_ids=list(state.request.prompt_ids),
        text=text,
        token_ids=state.output_ids,
        finish_reason=state.finish_reason.value,
        stats=state.stats,
        origins=state.origins,
        logprobs=state.logprobs if state.params.logprobs is not None else None,
        seed=state.seed,
        is_invariant=is_invariant,
        trace=rounds,
    )


def held_back(state: RequestState) -> int:
    """Length of the longest suffix of the text that begins a stop string, which must not be shown yet."""
    longest = 0
    for stop in state.params.stop:
        for size in range(1, min(len(stop), len(state.text)) + 1):
            if state.text.endswith(stop[:size]):
                longest = max(longest, size)
    return longest


def beams_of(codec: TextCodec, found: BeamResult, prompt_ids: Sequence[int]) -> list[BeamOutput]:
    """The texts of a finished beam search, best first."""
    texts = [codec.decode(beam.token_ids, prompt_ids=prompt_ids) for beam in found.hypotheses]
    return [
        BeamOutput(text, list(beam.token_ids), beam.score, found.num_passes, found.num_levels)
        for text, beam in zip(texts, found.hypotheses, strict=True)
    ]
