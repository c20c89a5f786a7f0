"""A request of the API as the worker takes it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from outrider.codecs.chat_formats import Reader
from outrider.core.request import Request

DEFAULT_LANE = ""
"""The method the server was started with."""


@dataclass(frozen=True)
class PredictedLane:
    """Copies from a text that the answer is expected to repeat. It lives as long as its request."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class FixedLane:
    """A method that guesses the same number of tokens every round. It lives as long as somebody asks for it."""

    method: str
    """``DEFAULT_LANE`` for the server's own."""
    num_draft_tokens: int


def method_of(lane: Hashable) -> str | None:
    """Name of a lane's method, ``DEFAULT_LANE`` for the server's own; None for a prediction."""
    if isinstance(lane, FixedLane):
        return lane.method
    return None if isinstance(lane, PredictedLane) else str(lane)


def is_passing(lane: Hashable) -> bool:
    """Whether the lane is forgotten when nobody is in it."""
    return isinstance(lane, FixedLane | PredictedLane)


@dataclass(frozen=True, eq=False)
class Order:
    """One engine request per choice, and how the answer is to be made of them."""

    requests: list[Request]
    prompts: list[str]
    """Text of each choice's prompt, if it is to be echoed."""
    lane: Hashable
    max_draft: int | None
    trace: bool
    function: str | None = None
    """The tool that was named: its arguments are what is generated."""
    num_prompt_tokens: int = 0
    """Tokens of all prompts, each prompt counted once."""
    num_best: int | None = None
    """How many choices of each prompt are answered: the most probable ones."""
    new_reader: Callable[[], Reader] | None = None
    """Reads calls and thinking out of a choice's text."""
    is_legacy: bool = False
    """Calls are answered as ``function_call``."""
    prompt_logprobs: int | None = None
    """Score the prompts too, with so many alternatives for each token."""
    is_scored_only: bool = False
    """Whether the prompt is only scored: ``max_tokens`` is 0."""
    priority: int = 0
    shares_prefix: bool = True
    """The prompt may be read from, and kept among, the shared beginnings."""

    @property
    def method_name(self) -> str | None:
        """What the answer calls its method; None for the server's own."""
        method = method_of(self.lane)
        return "prediction" if method is None else method or None
