"""What the Python API returns: finished requests, pieces of running ones, and the texts of a beam search."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.request import Origin, Stats, TokenLogprob
from outrider.core.trace import Round


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """A finished request."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    """"stop" or "length"."""
    stats: Stats
    origins: list[Origin]
    """Where each token came from."""
    logprobs: list[TokenLogprob] | None
    seed: int
    is_invariant: bool = False
    """Scores were the same bits whatever shared a pass, so this is the text of the request alone and of plain decoding. False:
    two tokens that are about equally likely can change places (see docs/lossless.md)."""
    trace: list[Round] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class StreamChunk:
    """What one round added to one request."""

    index: int
    """Which prompt."""
    text: str
    token_ids: list[int]
    origins: list[Origin]
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
    """Levels that the passes settled; plain search needs as many passes."""
