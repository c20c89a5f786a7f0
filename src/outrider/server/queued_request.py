"""A request of the API as the worker takes it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from outrider.codecs.chat_formats import Reader
from outrider.core.request import Request

DEFAULT_LANE = ""
"""The lane of the server's own method."""


@dataclass(frozen=True)
class PredictedLane:
    """A lane that copies from a predicted text (OpenAI's Predicted Outputs). It lives as long as its request."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class FixedLane:
    """A lane with a fixed draft length. It lives as long as a request uses it."""

    method: str
    """``DEFAULT_LANE`` for the server's own."""
    num_draft_tokens: int


def method_of(lane: Hashable) -> str | None:
    """The name of a lane's method, ``DEFAULT_LANE`` for the server's own, None for a prediction."""
    if isinstance(lane, FixedLane):
        return lane.method
    return None if isinstance(lane, PredictedLane) else str(lane)


def is_passing(lane: Hashable) -> bool:
    """Whether the lane is removed when no request uses it."""
    return isinstance(lane, FixedLane | PredictedLane)


@dataclass(frozen=True)
class Shown:
    """Optional parts of an answer beside its text."""

    ids: bool = False
    """Token ids of the prompt and of the answer."""
    names_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""
    reasoning: bool = True
    """The model's thinking."""


@dataclass(frozen=True, eq=False)
class Order:
    """The engine requests of one HTTP request, one per choice, and how to turn them into its answer."""

    requests: list[Request]
    prompts: list[str]
    """Text of each choice's prompt, if it is echoed."""
    lane: Hashable
    max_draft: int | None
    trace: bool
    num_each: int = 1
    """Choices per prompt."""
    shown: Shown = Shown()
    function: str | None = None
    """The forced tool, whose arguments are generated."""
    is_required: bool = False
    """Whether the forced tool is the only one, and not the one that the request named."""
    num_prompt_tokens: int = 0
    """Tokens of all prompts, each prompt counted once."""
    num_best: int | None = None
    """Number of choices returned for each prompt: the most probable ones."""
    new_reader: Callable[[], Reader] | None = None
    """Makes a parser of tool calls and thinking for a choice's text."""
    is_legacy: bool = False
    """Whether tool calls are returned as ``function_call``."""
    prompt_logprobs: int | None = None
    """Number of alternatives per token with which the prompts are scored too; None does not score them."""
    is_scored_only: bool = False
    """Whether the prompt is only scored: ``max_tokens`` is 0."""
    priority: int = 0
    shares_prefix: bool = True
    """Whether the prompt may use and enter the prefix cache."""

    @property
    def method_name(self) -> str | None:
        """The method's name in the answer; None for the server's own."""
        method = method_of(self.lane)
        return "prediction" if method is None else method or None
