"""Rounds of made-up requests, timed: what a round of so many rows with so many guesses takes, on the host and on a device.

A time is the least of a few rounds, since neighbours only ever add to it. Nothing that was emitted is kept. On the host a round
has two parts, the drafter's and all the rest. On a device it is one graph, so the whole of it is the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    from outrider.engine.graphs import RoundGraphs

_REPEATS = 4
"""Rounds of a time. The first is not counted: a pass of another width than the ones before is slow."""
_PROMPT_LEN = 16


class Cost(NamedTuple):
    """Seconds of the parts of a round."""

    draft: float
    rest: float


class Trial(ABC):
    """Times rounds."""

    @abstractmethod
    def rounds(self, num_rows: int, guesses: Sequence[int]) -> Iterator[tuple[int, Cost]]:
        """The cost of a round of ``num_rows`` requests with each of these numbers of guesses along a path, one by one. Numbers
        that cannot be drafted are left out."""


@final
class HostTrial(Trial):
    """Rounds of the engine."""

    def __init__(self, target: Target, drafter: Drafter, nodes_of: Callable[[int], int] = lambda length: length) -> None:
        """``nodes_of`` says how many guesses in all a draft of so many along a path has."""
        self._target, self._drafter, self._nodes_of = target, drafter, nodes_of

    def rounds(self, num_rows: int, guesses: Sequence[int]) -> Iterator[tuple[int, Cost]]:
        target, policy = self._target, _Told()
        engine = Engine(target, Method(self._drafter, Coupled(), policy))
        params = SamplingParams(max_tokens=target.max_len, ignore_eos=True)
        prompt = [1 + token % (target.vocab_size - 1) for token in range(_PROMPT_LEN)]
        batch = engine.start([Request(prompt, params)] * num_rows)
        for length in guesses:
            if _PROMPT_LEN + _REPEATS * (1 + length) > target.max_len:  # all guesses may be accepted
                continue
            policy.next = Plan((length,) * num_rows, (self._nodes_of(length),) * num_rows)
            seen = [engine.step(batch).seen for _ in range(_REPEATS)][1:]
            if all(min(one.draft.tree.sizes) > 1 for one in seen) or not length:
                draft = min(one.draft_seconds for one in seen)
                yield length, Cost(draft, min(one.seconds - one.draft_seconds for one in seen))


@final
class DeviceTrial(Trial):
    """Captured rounds of empty slots. They stand still, behind two tokens of text, and do all that other rounds do. They take
    no memory of their own: empty slots share a page."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self._graphs = graphs

    def rounds(self, num_rows: int, guesses: Sequence[int]) -> Iterator[tuple[int, Cost]]:
        graphs = self._graphs
        if not graphs.is_held_by_another(self):
            for length in [length for length in guesses if length in graphs.depths]:
                yield length, Cost(0.0, min([_replayed(graphs, num_rows, length) for _ in range(_REPEATS)][1:]))


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
    """Plans what it is told."""

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
    """Guesses a chain of one token, whatever the text, in no time."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.CHAIN
    draws = Draws.DETERMINISTIC

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        rows = [[root, *[0] * plan.max_depth[0]] for root in context.roots]
        return Draft(TokenTree.chain(torch.tensor(rows, device=context.device)), self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        del state, observation
