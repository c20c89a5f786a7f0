"""Draft lengths and trees: from the lengths of rows to a plan, and from a draft back to the length it reached."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.device_round import CapturedShape
from outrider.core.interfaces import Doubt, Plan, StopRule
from outrider.core.reason import Reason, ReasonCode


def plan_of(
    lengths: Sequence[int],
    longest: int,
    num_tree_nodes: int | None,
    *,
    stop: StopRule | None = None,
    doubt: Doubt | None = None,
    reason: Reason | None = None,
) -> Plan:
    """A plan with these lengths. A row of the longest length gets ``num_tree_nodes`` nodes, shorter ones proportionally fewer.
    Without that option, a row gets as many nodes as guesses along one path."""
    reason = reason or Reason(ReasonCode.RULE, {"length": max(lengths, default=0)})
    if num_tree_nodes is None:
        return Plan(tuple(lengths), tuple(lengths), stop, doubt, reason)
    nodes = (nodes_of(length, num_tree_nodes / longest) for length in lengths)
    return Plan(tuple(lengths), tuple(nodes), stop, doubt, reason)


def nodes_of(length: int, spread: float) -> int:
    """Number of guesses of a tree of this depth, with ``spread`` guesses per level on average, and at least one."""
    return max(length, math.ceil(spread * length - 1e-9))


def spreads_of(longest: int, num_tree_nodes: int | None) -> list[float]:
    """Guesses per level of the trees that may be planned: one, as in a chain, and repeated halves of the largest number."""
    spread, found = (num_tree_nodes or 0) / longest, [1.0]
    while spread > 1:
        found.insert(1, spread)
        spread /= 2
    return found


def nearest_spread(plan: Plan | None, spreads: Sequence[float]) -> float:
    """The spread of a draft that was made by a plan."""
    if len(spreads) == 1 or plan is None or not any(plan.max_depth):
        return spreads[0]
    made = max(plan.max_nodes) / max(plan.max_depth)
    return min(spreads, key=lambda spread: abs(spread - made))


def captured_lengths(longest: int, num_tree_nodes: int | None) -> CapturedShape:
    """All lengths up to the longest."""
    plans = {length: plan_of([length], longest, num_tree_nodes) for length in range(1, longest + 1)}
    return CapturedShape({length: plan.max_nodes[0] for length, plan in plans.items()})
