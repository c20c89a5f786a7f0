"""Sampling parameters: how a request wants its tokens chosen and when it ends. Names are those vLLM and OpenAI use."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from outrider.core.errors import RequestError, nearest

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""``(tokens so far, prompt included; logits [V]) -> logits [V]``; called for every node of a tree with that node's path."""


class Grammar(Protocol):
    """Which tokens may come next. States are values, so every node of a tree can have its own."""

    def initial(self) -> Hashable:
        """State before the first token."""
        ...

    def advance(self, state: Any, token: int) -> Hashable | None:
        """State after ``token``; None if the token is not allowed there."""
        ...

    def allowed(self, state: Any, vocab_size: int) -> Tensor:
        """[V] boolean."""
        ...

    def forced(self, state: Any) -> Sequence[int]:
        """Tokens that must follow, as far as known; empty where there is a choice. They are guesses for drafters: the
        same text may be split into tokens in several ways."""
        ...


Class = TypeVar("Class")


def _refusing_unknown_names(kind: type[Class]) -> type[Class]:
    """A dataclass that answers a misspelt field with the nearest one, instead of Python's own error."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    made = kind.__init__

    @wraps(made)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in names:
                raise RequestError(f"unknown sampling parameter {name!r}; {nearest(name, names)}")
        made(self, *values, **named)

    kind.__init__ = checked
    return kind


@_refusing_unknown_names
@dataclass(frozen=True)
class SamplingParams:
    """Everything but the prompt.

    The stages are applied in this order: user processors, logit bias, banned and minimum tokens, grammar,
    repetition / presence / frequency penalties, temperature, top-k, top-p, min-p, typical-p.
    """

    max_tokens: int = 128
    """Most tokens to generate."""
    temperature: float = 0.0
    """0 is greedy: a point mass on the largest logit, the lowest token id on a tie."""
    top_k: int = 0
    """Keep the k largest; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the largest probability; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the most typical tokens whose probabilities reach this sum; 1 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the output are divided (positive) or multiplied (negative) by it."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens. -inf bans a token. inf forces tokens: only those can come, with the
    model's own odds among them."""
    banned_token_ids: Sequence[int] = ()
    """Tokens that never come."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many tokens."""
    stop: Sequence[str] = ()
    """Strings that end the text; cut off unless ``include_stop_str_in_output``."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, beside the end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    seed: int | None = None
    """The same seed gives the same text. None draws a random seed."""
    logprobs: int | None = None
    """Return each emitted token's log-probability under the raw logits, and the top ``logprobs`` alternatives."""
    grammar: Grammar | None = None
    """Which tokens may come next; ``LLM.grammar`` makes one."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Functions of tokens and logits that are called before everything else."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "banned_token_ids", "logits_processors"):
            object.__setattr__(self, name, _listed(name, self.__dict__[name]))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name, valid, meaning in _BOUNDS:
            value = self.__dict__[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not valid(value):
                raise RequestError(f"{name} = {value!r} is not valid; use {meaning}")
        self._check_lists()

    def _check_lists(self) -> None:
        for text in self.stop:
            if not isinstance(text, str):
                raise RequestError(f"stop holds {text!r}, which is no string; give strings, and token ids in stop_token_ids")
            if not text:
                raise RequestError("stop holds an empty string, which would end every text at once; remove it")
        for name in ("stop_token_ids", "banned_token_ids"):
            bad = next((token for token in self.__dict__[name] if not _is_whole(token)), None)
            if bad is not None:
                raise RequestError(f"{name} holds {bad!r}, which is no token id; give whole numbers")
        if self.seed is not None and (not _is_whole(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise RequestError(f"seed = {self.seed!r} is not valid; use a whole number of 64 bits, or None")
        if self.logprobs is not None and (not _is_whole(self.logprobs) or not 0 <= self.logprobs <= 1000):
            raise RequestError(f"logprobs = {self.logprobs!r} is not valid; use a number from 0 to 1000, or None")

    def repeated(self, n: int) -> list[SamplingParams]:
        """The parameters of ``n`` texts of one prompt, with seeds seed, seed + 1 and so on. Each text is the same
        when generated alone."""
        if not _is_whole(n) or n < 1:
            raise RequestError(f"n = {n!r} is not valid; give the number of texts per prompt, at least 1")
        seeds = [None if self.seed is None else (self.seed + i) % 2**63 if i else self.seed for i in range(n)]
        return [replace(self, seed=seed) for seed in seeds]

    @property
    def forced_token_ids(self) -> list[int]:
        """Tokens that a bias of inf forces; empty if none is forced."""
        return [token for token, bias in self.logit_bias.items() if bias == math.inf]

    def check_support(self, vocab_size: int, end_ids: frozenset[int]) -> None:
        """Refuse parameters that leave no token to choose from."""
        banned = {*self.banned_token_ids, *(token for token, bias in self.logit_bias.items() if bias == -math.inf)}
        left = set(self.forced_token_ids or range(vocab_size)) - banned if banned or self.forced_token_ids else None
        if left is not None and not left:
            what = "logit_bias forces only tokens that are banned" if self.forced_token_ids else "every token is banned"
            raise RequestError(f"{what}, so there is nothing to choose from; leave at least one token in {_BANS}")
        if self.min_tokens and left is not None and left <= end_ids:
            raise RequestError(
                f"min_tokens = {self.min_tokens} forbids the tokens that end a text, and all others are banned; lower it, "
                f"or leave another token in {_BANS}"
            )

    @staticmethod
    def of(**options: Any) -> SamplingParams:
        """Build parameters from keyword options. An unknown name is refused, and the nearest one suggested."""
        return SamplingParams(**options)


_BANS = "banned_token_ids and logit_bias"


def as_params(params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """The parameters of a call as a list: one for every prompt, or one for all of them."""
    if params is None:
        return [SamplingParams()]
    many = [params] if isinstance(params, SamplingParams) else params
    if isinstance(many, str | Mapping) or not isinstance(many, Sequence):
        raise RequestError(f"params = {many!r} is not valid; give SamplingParams(max_tokens=64, ...), or a list of them")
    bad = next((one for one in many if not isinstance(one, SamplingParams)), None)
    if bad is not None:
        raise RequestError(f"params holds {bad!r}; give one SamplingParams(max_tokens=64, ...), or one per prompt")
    return list(many)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """A list of any kind as a tuple. None becomes an empty tuple, as in OpenAI's API."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} = {value!r} is not valid; give a list, or None")
    return tuple(value)


def _biases(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias = {value!r} is not valid; give a dict from token ids to numbers")
    try:
        found = {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError) as error:
        raise RequestError(f"logit_bias is not valid ({error}); give a dict from token ids to numbers") from None
    if any(math.isnan(bias) for bias in found.values()):
        raise RequestError("logit_bias holds a NaN; use a number, -inf to ban a token, or inf to force one")
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and value >= low


_BOUNDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", _whole(1), "a whole number of at least 1"),
    ("temperature", lambda value: 0 <= value < math.inf, "0 (greedy) or a positive number"),
    ("top_k", _whole(0), "a whole number, 0 to keep every token"),
    ("top_p", lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "a number between 0 and 1"),
    ("typical_p", lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    ("repetition_penalty", lambda value: 0 < value < math.inf, "a positive number, 1 for none"),
    ("presence_penalty", math.isfinite, "a finite number, 0 for none"),
    ("frequency_penalty", math.isfinite, "a finite number, 0 for none"),
    ("min_tokens", _whole(0), "a whole number of at least 0"),
)
