"""A policy within limits: what is cut is cut, and nothing else of its plan is lost."""

from __future__ import annotations

import pytest

from outrider.core.interfaces import Doubt, Observation, Plan, Policy, Stateless
from outrider.engine.limits import Limited


class _Planned(Policy):
    """Always the same plan; counts what it is told."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.num_updates = plan, 0

    def start(self, num_rows: int) -> Stateless:
        return Stateless()

    def plan(self, state: Stateless, num_rows: int) -> Plan:
        return self._plan

    def update(self, state: Stateless, observation: Observation) -> None:
        self.num_updates += 1


class _Never:
    def __call__(self, *_: object) -> list[bool]:
        return [False, False]


DOUBT = Doubt((0.3,), (0.1,), (1.0, 0.9))
PLAN = Plan((6, 4), (12, 8), _Never(), DOUBT)  # pyright: ignore[reportArgumentType]


def _limited(limits: list[int | None], room: int | None = None) -> tuple[Limited, Plan]:
    policy = Limited(_Planned(PLAN))
    state = policy.start(2)
    state.limits, state.room = limits, room
    return policy, policy.plan(state, 2)


@pytest.mark.parametrize(
    ("limits", "room", "depth", "nodes"),
    [
        ([None, None], None, (6, 4), (12, 8)),
        ([2, None], None, (2, 4), (12, 8)),
        ([0, None], None, (0, 4), (0, 8)),
        ([None, 3], 5, (5, 3), (5, 5)),
        ([0, 0], None, (0, 0), (0, 0)),
        ([None, None], 0, (0, 0), (0, 0)),
    ],
)
def test_every_row_keeps_to_its_limit_and_the_room(limits, room, depth, nodes):
    _, plan = _limited(limits, room)
    assert (plan.max_depth, plan.max_nodes) == (depth, nodes)


@pytest.mark.parametrize(("limits", "room"), [([None, None], None), ([2, None], None), ([None, 3], 5)])
def test_what_ends_a_draft_early_is_passed_on(limits, room):
    _, plan = _limited(limits, room)
    assert plan.doubt is DOUBT and plan.stop is PLAN.stop


def test_rounds_that_were_not_the_policys_are_not_told():
    policy = Limited(_Planned(PLAN))
    state = policy.start(2)
    for limits, room in (([0, 0], None), ([None, 1], 0), ([None, 0], None)):
        state.limits, state.room = limits, room
        policy.update(state, None)  # pyright: ignore[reportArgumentType]
    assert policy.inner.num_updates == 1  # pyright: ignore[reportAttributeAccessIssue]
