"""Sampling parameters: how a request wants its tokens chosen and when it ends. Names are those vLLM and OpenAI use."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from torch import Tensor

from outrider.core.errors import RequestError, nearest

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""``(tokens so far, prompt included; logits [V]) -> logits [V]``; called for every node of a tree with that node's path."""


class Grammar(Protocol):
    """Which tokens may come next. States are values, so every node of a tree can have its own."""

    def initial(self) -> Hashable: ...

    def advance(self, state: Any, token: int) -> Hashable | None:
        """State after ``token``; None if the token is not allowed there."""
        ...

    def allowed(self, state: Any, vocab_size: int) -> Tensor:
        """[V] boolean."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """Everything but the prompt. Applied in this order: user processors, logit bias, banned and minimum tokens, grammar,
    repetition / presence / frequency penalties, temperature, top-k, top-p, min-p, typical-p."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy: a point mass on the largest logit, the lowest token id on a tie."""
    top_k: int = 0
    """Keep the k largest; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the output are divided (positive) or multiplied (negative) by it."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many tokens."""
    stop: Sequence[str] = ()
    """Strings that end the text; cut off unless ``include_stop_str_in_output``."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    """Same seed, same text. None draws one."""
    logprobs: int | None = None
    """Return each emitted token's log-probability under the raw logits, and the top ``logprobs`` alternatives."""
    grammar: Grammar | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "logit_bias", {int(token): float(bias) for token, bias in self.logit_bias.items()})
        for name, valid, meaning in _BOUNDS:
            value = self.__dict__[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not valid(value):
                raise RequestError(f"{name} = {value!r} is not valid; it must be {meaning}")
        self._check_lists()

    def _check_lists(self) -> None:
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string, which would end every text at once; remove it")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed = {self.seed} is not valid; it must fit into 64 bits")
        if self.logprobs is not None and not 0 <= self.logprobs <= 1000:
            raise RequestError(f"logprobs = {self.logprobs} is not valid; it must be between 0 and 1000")
        if any(math.isnan(bias) for bias in self.logit_bias.values()):
            raise RequestError("logit_bias holds a NaN; use a finite number or -inf to ban a token")

    @staticmethod
    def of(**options: Any) -> SamplingParams:
        """From keyword options, with a did-you-mean for unknown names."""
        names = {item.name for item in fields(SamplingParams)}
        for name in options:
            if name not in names:
                raise RequestError(f"unknown sampling parameter {name!r}; {nearest(name, names)}")
        return SamplingParams(**options)


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and value >= low


_BOUNDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", _whole(1), "a whole number of at least 1"),
    ("temperature", lambda value: 0 <= value < math.inf, "0 (greedy) or a positive number"),
    ("top_k", _whole(0), "a whole number, 0 to keep every token"),
    ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "between 0 and 1"),
    ("typical_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("repetition_penalty", lambda value: 0 < value < math.inf, "a positive number, 1 for none"),
    ("presence_penalty", math.isfinite, "a finite number, 0 for none"),
    ("frequency_penalty", math.isfinite, "a finite number, 0 for none"),
    ("min_tokens", _whole(0), "a whole number of at least 0"),
)
