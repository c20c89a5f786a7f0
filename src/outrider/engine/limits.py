"""What a request, and the memory there is, allow of a policy's plan.

A policy plans for the batch; a request may ask for fewer guesses than that or for none, and a round may have room for fewer
nodes than the policy would like. Both only make trees smaller, which no lossless rule minds (Lemma C of docs/lossless.md):
how long a draft is was decided before any of it was drawn.

    depth_b = min(plan_b, limit_b),   nodes_b = min(plan_b, room)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from outrider.core.interfaces import Observation, Plan, Policy, RowState
from outrider.core.reason import Reason, ReasonCode

_MEMORY = Reason(ReasonCode.MEMORY, {"room": 0})
_REQUEST = Reason(ReasonCode.REQUEST_LIMIT, {"limit": 0})


@final
@dataclass
class LimitedState(RowState):
    """The wrapped policy's state, and each row's own limit."""

    inner: Any
    limits: list[int | None]
    """Most guesses along a path of each row; None leaves it to the policy."""
    room: int | None = None
    """Most guesses in all of any row in the next round."""

    def fork(self, rows: Sequence[int]) -> LimitedState:
        return LimitedState(self.inner.fork(rows), [self.limits[row] for row in rows], self.room)

    def join(self, other: LimitedState) -> LimitedState:
        return LimitedState(self.inner.join(other.inner), [*self.limits, *other.limits], self.room)


@final
class Limited(Policy):
    """Another policy within limits that belong to the rows."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner

    def start(self, num_rows: int) -> LimitedState:
        return LimitedState(self.inner.start(num_rows), [None] * num_rows)

    def plan(self, state: LimitedState, num_rows: int) -> Plan:
        if state.room == 0 or all(limit == 0 for limit in state.limits):
            return Plan((0,) * num_rows, (0,) * num_rows, reason=_MEMORY if state.room == 0 else _REQUEST)
        plan = self.inner.plan(state.inner, num_rows)
        most = [_least(limit, state.room) for limit in state.limits]
        depth = tuple(d if m is None else min(d, m) for d, m in zip(plan.max_depth, most, strict=True))
        nodes = (n if state.room is None else min(n, state.room) for n in plan.max_nodes)
        reason = _shorter(depth, plan, state) or plan.reason
        return replace(
            plan, reason=reason, max_depth=depth, max_nodes=tuple(n if d else 0 for n, d in zip(nodes, depth, strict=True))
        )

    def forget(self, state: LimitedState | None) -> None:
        self.inner.forget(None if state is None else state.inner)

    def update(self, state: LimitedState, observation: Observation) -> None:
        if state.room != 0 and any(limit != 0 for limit in state.limits):
            self.inner.update(state.inner, observation)


def _shorter(depth: Sequence[int], plan: Plan, state: LimitedState) -> Reason | None:
    """The limit that cut the longest path, if one did."""
    longest, planned = max(depth), max(plan.max_depth)
    if longest == planned:
        return None
    if longest == state.room:
        return Reason(ReasonCode.MEMORY, {"room": longest})
    return Reason(ReasonCode.REQUEST_LIMIT, {"limit": longest})


def _least(first: int | None, second: int | None) -> int | None:
    given = [value for value in (first, second) if value is not None]
    return min(given) if given else None
