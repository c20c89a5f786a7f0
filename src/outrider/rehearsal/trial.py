"""Timed rounds of made-up requests: the seconds of a round by number of rows and guesses, on the host and on a device.

A time is the least of a few rounds, because other work on the machine only adds time. Emitted tokens are dropped. On the host a
round has two parts, the drafter's and all the rest. On a device it is one graph, so the whole of it is the rest. Rows and
guesses have different tokens: nodes of a mixture of experts then wake as many experts as those of a text do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from outrider.acceptance.coupled import Coupled
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Policy, Stateless, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.engine.round_kind import RoundKind
from outrider.engine.step import Engine

if TYPE_CHECKING:
    from outrider.engine.captured_rounds import RoundGraphs

_REPEATS = 4
"""Rounds per measurement. The first is not counted, because the first pass of a new width is slow."""
_PROMPT_LEN = 16
_STRIDE = 7919
"""Distance between neighbouring made-up tokens. It is a prime number, so that few tokens repeat in any vocabulary."""


class Cost(NamedTuple):
    """Seconds of the parts of a round."""

    draft: float
    rest: float


class Trial(ABC):
    """Times rounds."""

    @abstractmethod
    def rounds(self, num_rows: int, guesses: Sequence[int]) -> Iterator[tuple[int, Cost]]:
        """The cost of a round of ``num_rows`` requests, for each of these draft lengths in turn. Lengths that cannot be drafted
        are skipped."""


@final
class HostTrial(Trial):
    """Times host-driven rounds of the engine."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target, self._drafter = target, drafter

    def rounds(self, num_rows: int, guesses: Sequence[int]) -> Iterator[tuple[int, Cost]]:
        target, policy = self._target, _Told()
        engine = Engine(target, Method(self._drafter, Coupled(), policy))
        params = SamplingParams(max_tokens=target.max_len, ignore_eos=True)
        prompts = made_up(num_rows, _PROMPT_LEN, target.vocab_size).tolist()
        batch = engine.start([Request(prompt, params) for prompt in prompts])
        for length in guesses:
            if _PROMPT_LEN + _REPEATS * (1 + length) > target.max_len:  # all guesses may be accepted
                continue
            policy.next = Plan((length,) * num_rows, (length,) * num_rows)
            seen = [engine.step(batch).seen for _ in range(_REPEATS)][1:]
            if all(min(one.draft.tree.sizes) > 1 for one in seen) or not length:
                draft = min(one.draft_seconds for one in seen)
                yield length, Cost(draft, min(one.seconds - one.draft_seconds for one in seen))


@final
class DeviceTrial(Trial):
    """Times captured rounds of empty slots. The slots stay at a text of two tokens, and do everything else that real rounds do.
    They need no memory of their own, since empty slots share a page."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self._graphs = graphs

    def rounds(self, num_rows: int, guesses: Sequence[int]) -> Iterator[tuple[int, Cost]]:
        graphs = self._graphs
        if not graphs.is_held_by_another(self):
            for length in [length for length in guesses if length in graphs.depths]:
                with different_texts(graphs, num_rows):
                    yield length, Cost(0.0, min([_replayed(graphs, num_rows, length) for _ in range(_REPEATS)][1:]))


def made_up(num_rows: int, num_tokens: int, vocab_size: int) -> Tensor:
    """Texts [num_rows, num_tokens] whose tokens differ as much as the vocabulary allows."""
    return (_STRIDE * torch.arange(1, num_rows * num_tokens + 1)).view(num_rows, num_tokens) % vocab_size


@contextmanager
def different_texts(graphs: RoundGraphs, num_rows: int) -> Iterator[None]:
    """Give empty slots different texts for a while. If all had the same token, a mixture of experts would use too few
    experts."""
    tokens = graphs.frame(num_rows).tokens[:, :2]
    tokens.copy_(made_up(num_rows, 2, graphs.target.vocab_size))
    try:
        yield
    finally:
        tokens.zero_()


def _replayed(graphs: RoundGraphs, num_rows: int, num_guesses: int) -> float:
    """Seconds of one captured round on the device."""
    graph = graphs.round(RoundKind(num_rows, num_guesses))
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    graph.launch()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


@final
class _Told(Policy):
    """A policy with a given plan."""

    next: Plan

    def start(self, num_rows: int) -> Stateless:
        del num_rows
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        del state, num_rows
        return self.next

    def update(self, state: Stateless, observation: Observation) -> None:
        del state, observation


@final
class Chains(Drafter):
    """A drafter that guesses a chain of different tokens for any text, in no time."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.CHAIN
    draws = Draws.DETERMINISTIC

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        rows = made_up(len(context.roots), 1 + plan.max_depth[0], self._vocab_size)
        rows[:, 0] = torch.tensor(context.roots)
        return Draft(TokenTree.chain(rows.to(context.device)), self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        del state, observation
