"""Limits on a policy's plan: those of each request, and those of memory.

A policy plans for the batch. A request may ask for fewer guesses than that or for none, and a round may have room for fewer
nodes than the policy would like. Both only make trees smaller. Every lossless rule stays exact (Lemma C of docs/lossless.md),
because the size is decided before anything is drawn.

    depth_b = min(plan_b, limit_b, room),   nodes_b = min(plan_b, room)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core.interfaces import Plan
from outrider.core.reason import Reason, ReasonCode


def plain_plan(limits: Sequence[int | None], room: int) -> Plan | None:
    """The plan of a round in which no row may guess; the policy is not consulted. None for other rounds."""
    if room > 0 and any(limit != 0 for limit in limits):
        return None
    nothing = (0,) * len(limits)
    return Plan(nothing, nothing, reason=_reason(0, room))


def within(plan: Plan, limits: Sequence[int | None], room: int) -> Plan:
    """The plan, cut to each row's limit on paths and to ``room`` nodes per tree. It says which of the two limits applied."""
    if max(*plan.max_nodes, *plan.max_depth) <= room and limits.count(None) == len(limits):
        return plan
    most = [room if limit is None else min(limit, room) for limit in limits]
    depth = tuple(map(min, plan.max_depth, most))
    nodes = tuple(min(count, room) if length else 0 for count, length in zip(plan.max_nodes, depth, strict=True))
    reason = plan.reason if max(depth) == max(plan.max_depth) else _reason(max(depth), room)
    return replace(plan, max_depth=depth, max_nodes=nodes, reason=reason)


def _reason(longest: int, room: int) -> Reason:
    if longest == room:
        return Reason(ReasonCode.MEMORY, {"room": longest})
    return Reason(ReasonCode.REQUEST_LIMIT, {"limit": longest})
