"""A request, and what has become of it so far."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Protocol

from outrider.core.params import SamplingParams


class Origin(Enum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    """Drafted and accepted."""
    RECOVERED = "recovered"
    """The target's own token, in place of rejected guesses."""
    BONUS = "bonus"
    """The target's own token, where nothing was guessed."""


class FinishReason(Enum):
    STOP = "stop"
    """End-of-sequence token, stop token or stop string."""
    LENGTH = "length"
    """``max_tokens`` reached, or the context is full."""
    ERROR = "error"
    """The request itself failed: ``RequestState.failure`` says why. Other requests of the batch go on."""


class TextStream(Protocol):
    """Turns tokens into text one at a time."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty inside a multi-byte character."""
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt with its sampling parameters, as the user asked."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    new_stream: Callable[[], TextStream] | None = None
    """Makes the detokenizer; only needed for stop strings and streamed text."""
    read_ids: Sequence[int] = ()
    """Token ids that the target reads in place of ``prompt_ids``, one for one, for prompts with images. Ids beyond
    the vocabulary name embeddings that the target holds (``vision/book.py``). Empty for text."""
    held: object = None
    """An object that must live as long as the request: the embeddings that ``read_ids`` name."""

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end this request."""
        eos = frozenset() if self.params.ignore_eos else self.eos_ids
        return eos | frozenset(self.params.stop_token_ids)


@dataclass
class Stats:
    """The cost of a request. Tokens per target pass and the acceptance rate follow from it."""

    num_passes: int = 0
    """Target passes after the prefill; one pass emits at least one token."""
    num_drafted: int = 0
    """Guesses that were drafted."""
    num_accepted: int = 0
    """Guesses that were accepted."""
    num_tested: int = 0
    """Tested depths: the accepted ones, plus one where a rejection ended the path."""
    num_tokens: int = 0
    """Tokens that were emitted."""
    num_cached: int = 0
    """Prompt tokens that a stored beginning spared."""
    prefill_seconds: float = 0.0
    """Time to read the prompt."""
    draft_seconds: float = 0.0
    """Time of the drafter."""
    score_seconds: float = 0.0
    """Time of target passes."""
    seconds: float = 0.0
    """Wall time of the rounds this request took part in, prefill excluded."""

    @property
    def tokens_per_pass(self) -> float:
        """Tokens emitted per target pass; plain decoding has 1."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second, prefill included."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float:
        """Acceptance rate: accepted over tested depths. Accepted over drafted would depend on the draft length."""
        return self.num_accepted / self.num_tested if self.num_tested else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's raw logits, and its best alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class RequestState:
    """A running request. ``tokens`` only grows, and only by emitted tokens."""

    request: Request
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    """Prompt, then output."""
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    """The stop string or token that ended the text."""
    grammar_state: Hashable | None = None
    forced: tuple[int, int] = (0, 0)
    """Tokens of text that the grammar forces: those that were tested, and those that held."""
    stats: Stats = field(default_factory=Stats)
    stream: TextStream | None = None
    failure: Exception | None = None
    """Why the request ended with ``FinishReason.ERROR``."""
    max_draft: int | None = None
    """Most guesses along a path; 0 is plain decoding, None leaves it to the policy."""

    @staticmethod
    def of(request: Request, *, max_draft: int | None = None) -> RequestState:
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        grammar = request.params.grammar
        return RequestState(
            request,
            seed=seed - (1 << 64) if seed >= 1 << 63 else seed,
            tokens=list(request.prompt_ids),
            grammar_state=grammar.initial() if grammar else None,
            stream=request.new_stream() if request.new_stream else None,
            max_draft=max_draft,
        )

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def read_tokens(self) -> Sequence[int]:
        """``tokens`` as the target reads them: the positions of an image have ids of their own."""
        read = self.request.read_ids
        return [*read, *self.output_ids] if read else self.tokens

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """End the request because of ``error``, unless it has ended already."""
        if not self.is_finished:
            self.failure, self.finish_reason = error, FinishReason.ERROR
