"""A plan within limits: what is cut is cut, and nothing else of it is lost."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from outrider.core.interfaces import Doubt, Observation, Plan, Policy, Stateless
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.request import Request
from outrider.engine.limits import plain_plan, within
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.random_decoder import tiny_config, tiny_weights


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


ANY = sys.maxsize
DOUBT = Doubt((0.3,), (0.1,), (1.0, 0.9))
PLAN = Plan((6, 4), (12, 8), _Never(), DOUBT)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("limits", "room", "depth", "nodes"),
    [
        ([None, None], ANY, (6, 4), (12, 8)),
        ([2, None], ANY, (2, 4), (12, 8)),
        ([0, None], ANY, (0, 4), (0, 8)),
        ([None, 3], 5, (5, 3), (5, 5)),
        ([0, 0], ANY, (0, 0), (0, 0)),
        ([None, None], 0, (0, 0), (0, 0)),
    ],
)
def test_every_row_keeps_to_its_limit_and_the_room(limits: list[int | None], room: int, depth: Any, nodes: Any) -> None:
    plain = plain_plan(limits, room)
    plan = plain or within(PLAN, limits, room)
    assert (plan.max_depth, plan.max_nodes) == (depth, nodes)
    assert (plain is not None) == (depth == (0, 0))


@pytest.mark.parametrize(("limits", "room"), [([None, None], ANY), ([2, None], ANY), ([None, 3], 5)])
def test_what_ends_a_draft_early_is_passed_on(limits: list[int | None], room: int) -> None:
    plan = within(PLAN, limits, room)
    assert plan.doubt is DOUBT and plan.stop is PLAN.stop


def test_rounds_that_were_not_the_policys_are_not_told() -> None:
    target = Decoder(tiny_config(), tiny_weights(tiny_config(), seed=0))
    made = compose("prompt-lookup", target)
    policy = _Planned(Plan((2, 2), (2, 2)))
    engine = Engine(target, Method(made.drafter, made.rule, policy))
    batch = engine.start([Request([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)) for _ in range(2)])
    for limits, room in (([0, 0], ANY), ([None, 1], 0), ([None, 0], ANY)):
        for row, limit in zip(batch.rows, limits, strict=True):
            row.max_draft = limit
        engine.step(batch, room)
    assert policy.num_updates == 1
