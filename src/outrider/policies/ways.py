"""Which way a drafter drafts, where it has several that cost differently: the one with the most tokens per second.

A hybrid of a copying drafter and a draft model can copy, which takes next to no time, or ask both. Priced as one, copies cost
what the draft model costs, and where that does not pay nothing is drafted at all. So every way has a default policy of its own,
with its own prices, rates and losses. The plan that promises most is played. A round that does not draft tells all of them
something. Where another way drafts, what is known of this one fades, until it is worth another try.

    way = argmax_i gain_i,      gain_i: the speed that i's plan promises, plain decoding being 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Observation, Plan, Policy, RowState
from outrider.core.prices import PriceSource
from outrider.core.reading import Prompts
from outrider.core.reason import ReasonCode
from outrider.policies.adaptive import Adaptive


@dataclass
class _State(RowState):
    inner: list[Any]
    """The state of every way's policy."""
    way: int = 0
    """The way of the last plan."""

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([state.fork(rows) for state in self.inner], self.way)

    def join(self, other: _State) -> _State:
        return _State([mine.join(theirs) for mine, theirs in zip(self.inner, other.inner, strict=True)], self.way)


@final
class Ways(Policy):
    """A default policy for each way of a drafter."""

    def __init__(self, ways: Sequence[Adaptive]) -> None:
        """``ways``: the cheapest first, as the drafter counts them."""
        self.ways = tuple(ways)

    def expect(self, prices: PriceSource) -> None:
        for way in self.ways:
            way.expect(prices)

    def forget(self, state: _State | None) -> None:
        for index, way in enumerate(self.ways):
            way.forget(None if state is None else state.inner[index])

    def captured_shape(self) -> CapturedShape:
        """That of the whole drafter. Rounds are captured for it, so from now on it is asked as a whole."""
        self.ways = self.ways[-1:]
        return self.ways[0].captured_shape()

    def start(self, num_rows: int) -> _State:
        return _State([way.start(num_rows) for way in self.ways])

    def carry(self, state: _State, prompts: Prompts) -> None:
        for way, inner in zip(self.ways, state.inner, strict=True):
            way.carry(inner, prompts)

    def plan(self, state: _State, num_rows: int) -> Plan:
        plans = [way.plan(inner, num_rows) for way, inner in zip(self.ways, state.inner, strict=True)]
        state.way = max(range(len(plans)), key=lambda index: _worth(plans[index]))
        return plans[state.way] if len(plans) == 1 else replace(plans[state.way], way=state.way)

    def update(self, state: _State, observation: Observation) -> None:
        has_drafted = observation.plan is None or any(observation.plan.max_depth)
        for index, (way, inner) in enumerate(zip(self.ways, state.inner, strict=True)):
            if index == state.way or not has_drafted:
                way.update(inner, observation)
            else:
                way.stand_by(inner, observation)


def _worth(plan: Plan) -> float:
    """The speed that a plan promises. A round that measures costs comes before all, and a probe before a round without one."""
    if plan.reason is None or not any(plan.max_depth):
        return float("inf") if plan.reason is not None and plan.reason.code is ReasonCode.CALIBRATION else 1.0
    known = {ReasonCode.CALIBRATION: float("inf"), ReasonCode.PROBE: 1.0 + 1e-6}
    return known.get(plan.reason.code, plan.reason.numbers.get("gain", 1.0))
