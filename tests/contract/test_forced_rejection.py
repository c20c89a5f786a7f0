"""A verdict may stop anywhere: whatever is thrown away, text and caches stay those of plain decoding.

Every row of the table runs under every rule with verdicts cut short at every depth, at every node, and at random, differently
for every row of a batch and every round; the token of the first dropped node is then the next token, so the text must not
change. ("Caches" are the target's and those of every draft model inside the drafter.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import pytest
from fresh_prefill import assert_near
from test_methods import EOS, PROMPTS, make, pairs  # noqa: F401 (a fixture)
from test_rules_exact import CASES, EXACT, TREES
from tiers import repeats
from tiny_pair import tiny_model
from toy_laws import Experiment, by_draws, chain, distance, grow, toy_pair

from outrider.acceptance import Coupled
from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import AcceptanceRule, Cache, Drafter, RowDraft, Target
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.random_source import RandomSource
from outrider.core.request import Request
from outrider.core.rng import Noise
from outrider.core.sampling import Law
from outrider.core.verdict import RowVerdict, Verdict
from outrider.engine.step import Batch, Engine
from outrider.methods import METHODS, compose

Stop = Callable[[int, int, list[int]], int]
"""(round, row, accepted nodes) -> how many of them are kept."""
NUM_TOKENS = 8


@final
@dataclass(frozen=True, eq=False)
class Cut(AcceptanceRule):
    """Another rule whose accepted paths are cut; it fits whatever that rule fits."""

    inner: AcceptanceRule
    stop: Stop
    depths: set[int] = field(default_factory=set)
    """Depths at which a path was really cut."""
    rounds: list[int] = field(default_factory=list)

    exact_for = tuple(Draws)
    shape = Shape.TREE
    lossless = True

    def walk(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        verdict = self.inner.walk(draft, law, noise)
        kept, next_token, rejected = verdict.num_accepted.clone(), verdict.next_token.clone(), verdict.rejected.clone()
        for row, count in enumerate(verdict.num_accepted.tolist()):
            path = verdict.path[row, :count].tolist()
            depth = self.stop(len(self.rounds), row, path)
            if depth < count:
                self.depths.add(depth)
                kept[row], rejected[row], next_token[row] = depth, True, draft.tree.tokens[row, path[depth]]
        self.rounds.append(0)
        return Verdict(verdict.path, kept, next_token, rejected)

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        found = self.inner.walk_row(row, source)
        depth = self.stop(0, 0, list(found.path))
        return found if depth >= len(found.path) else RowVerdict(found.path[:depth], row.tokens[found.path[depth]], True)


def at_depth(depth: int) -> Stop:
    return lambda round_, row, path: depth


def in_turn(round_: int, row: int, path: list[int]) -> int:
    """Depth 0, 1, 2 ... round by round, shifted from row to row."""
    return (round_ + row) % 5


def at_nodes(round_: int, row: int, path: list[int]) -> int:
    """One node in three is never entered, another third every round: in time that is every node."""
    return next((depth for depth, node in enumerate(path) if (node + round_ + row) % 3 == 0), len(path))


def by_chance(round_: int, row: int, path: list[int]) -> int:
    return random.Random(f"{round_} {row}").randint(0, len(path))


SCHEDULES: dict[str, Stop] = {"always at once": at_depth(0), "in turn": in_turn, "nodes": at_nodes, "chance": by_chance}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_model()


@pytest.fixture(scope="module")
def draft() -> Target:
    """So good that there is something to cut."""
    return tiny_model(0.05)


@pytest.fixture(scope="module")
def expected(target) -> dict[str, list[list[int]]]:
    plain = compose("plain", target)
    return {name: run_all(target, plain, params) for name, params in PARAMS.items()}


PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, top_p=0.95, seed=7, ignore_eos=True),
}


def rounds_of(target: Target, method: Method, params: SamplingParams) -> Iterator[Batch]:
    """A batch of three after every round, finished rows included."""
    engine = Engine(target, method)
    batch = engine.start([Request(prompt, params, EOS) for prompt in PROMPTS[2:5]])
    while batch.rows:
        engine.step(batch)
        yield batch
        batch = batch.without_finished()


def run_all(target: Target, method: Method, params: SamplingParams, check: Callable[[Batch], None] | None = None) -> Any:
    done: dict[int, list[int]] = {}
    for batch in rounds_of(target, method, params):
        if check is not None:
            check(batch)
        done |= {number: state.output_ids for number, state in zip(batch.ids, batch.rows, strict=True) if state.is_finished}
    return [done[number] for number in sorted(done)]


# --- texts ------------------------------------------------------------------------------------------------------------


def one_rule_each() -> list[Any]:
    """Every method with every rule. ``make test`` has one rule a method, in turn: what is cut does not depend on the rule."""
    rules: dict[str, list[str]] = {}
    for name, rule in pairs():
        rules.setdefault(name, []).append(rule)
    usual = {(name, found[turn % len(found)]) for turn, (name, found) in enumerate(rules.items())}
    return [pytest.param(*pair, marks=() if pair in usual else pytest.mark.exhaustive) for pair in pairs()]


def schedules_in_turn() -> list[Any]:
    """Every method cut at nodes and by chance; ``make test`` has one of them a method, in turn."""
    ways = ("nodes", "chance")
    return [
        pytest.param(name, way, marks=() if way == ways[turn % 2] else pytest.mark.exhaustive)
        for turn, name in enumerate(METHODS)
        for way in ways
    ]


@pytest.mark.parametrize(("name", "rule"), one_rule_each())
def test_greedy_text_survives(target, make, expected, name: str, rule: str) -> None:  # noqa: F811
    method = make(name, acceptance=rule)
    for stop in [in_turn, at_nodes][: len(repeats(1, of=2))]:  # seeded texts below are cut at nodes
        cut = Method(method.drafter, Cut(method.rule, stop), method.policy)
        assert run_all(target, cut, PARAMS["greedy"]) == expected["greedy"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.acceptance == "coupled"])
def test_seeded_text_survives(target, make, expected, name: str) -> None:  # noqa: F811
    """The other schedules follow, with a look at the caches: ``make test`` has those."""
    method = make(name)
    for schedule in ("in turn", "always at once"):
        cut = Method(method.drafter, Cut(method.rule, SCHEDULES[schedule]), method.policy)
        assert run_all(target, cut, PARAMS["seeded"]) == expected["seeded"]


def test_there_was_something_to_cut(target, draft) -> None:
    """The schedules above really stop at every depth of a draft that is nearly always right."""
    for name in ("draft-model", "draft-tree", "best-first", "hybrid", "rasd", "cascade", "multi-draft"):
        method = compose(name, target, draft=draft, options={"num_draft_tokens": 5})
        seen: set[int] = set()
        for stop in SCHEDULES.values():
            if seen >= {0, 1, 2}:
                break
            rule = Cut(method.rule, stop)
            run_all(target, Method(method.drafter, rule, method.policy), PARAMS["greedy"])
            seen |= rule.depths
        assert seen >= {0, 1, 2}, name


# --- caches -----------------------------------------------------------------------------------------------------------


def drafts_in(drafter: Drafter, state: Any) -> Iterator[tuple[Target, Cache]]:
    """Every draft model in a drafter, with its cache in the state; drafters inside drafters too."""
    models = [model for value in vars(drafter).values() for model in _all(value, Target)]
    caches = [cache for value in vars(state).values() for cache in _all(value, Cache)]
    yield from zip(models, caches, strict=False)
    inner = [part for value in vars(drafter).values() for part in _all(value, Drafter)]
    states = [part for key in ("inner", "retrieved") if key in vars(state) for part in _listed(vars(state)[key])]
    for part, its in zip(inner, states, strict=True):
        yield from drafts_in(part, its)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _all(value: Any, kind: type) -> list[Any]:
    return [item for item in _listed(value) if isinstance(item, kind)]


def check_cache(model: Target, cache: Any, batch: Batch, *, lag: int | None) -> None:
    """What a cache holds is what a fresh prefill of the committed text gives."""
    fresh: Any = model.new_cache(len(batch.rows))
    model.prefill([state.tokens[:-1] for state in batch.rows], fresh)
    for row, state in enumerate(batch.rows):
        length = cache.lengths[row]
        if not state.is_finished:  # a finished row may have been cut inside an accepted run
            missing = len(state.tokens) - 1 - length
            assert missing >= 0 and (lag is None or missing == lag)
        used = min(length, fresh.lengths[row])
        for mine, other in zip([*cache.keys, *cache.values], [*fresh.keys, *fresh.values], strict=True):
            assert_near(mine[row, :, :used], other[row, :, :used])


@pytest.mark.parametrize(("name", "schedule"), schedules_in_turn())
def test_caches_and_seeded_text_survive(target, make, expected, name: str, schedule: str) -> None:  # noqa: F811
    method = make(name)
    cut = Method(method.drafter, Cut(method.rule, SCHEDULES[schedule]), method.policy)

    def check(batch: Batch) -> None:
        check_cache(target, batch.cache, batch, lag=0)
        if name == "pearl":  # its draft is ahead of the text: tests/unit/test_pearl.py
            return
        if not METHODS[name].any_tokenizer:  # their drafts read other tokens: tests/unit/test_translation.py
            for model, cache in drafts_in(method.drafter, batch.drafter_state):
                if model is not target and cache is not batch.cache:  # a drafter that is the target shares its cache
                    check_cache(model, cache, batch, lag=None)

    text = run_all(target, cut, PARAMS["seeded"], check)
    assert text == expected["seeded"] or METHODS[name].acceptance != "coupled"


def test_every_draft_model_is_found(target, draft) -> None:
    for name, count in {"draft-model": 1, "best-first": 1, "hybrid": 1, "rasd": 1, "cascade": 2, "multi-draft": 2}.items():
        options = {"inner": "draft-model"} if name == "cascade" else {}
        method = compose(name, target, draft=[draft, tiny_model(0.2)], options=options)
        for batch in rounds_of(target, method, PARAMS["greedy"]):
            found = list(drafts_in(method.drafter, batch.drafter_state))
            assert len(found) == count, name
            for model, cache in found:
                check_cache(model, cache, batch, lag=None)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "draws", "depth"),
    [
        pytest.param(*case.values, depth, marks=() if depth == turn % 2 else pytest.mark.exhaustive)
        for turn, case in enumerate(CASES)
        for depth in (0, 1)
    ],
)
@pytest.mark.usefixtures("remembered_plans")
def test_the_law_survives_a_cut_at_any_depth(rule: type[AcceptanceRule], draws: Draws, depth: int) -> None:
    """By enumeration, for rules that keep the law and not the text: what is cut off may have been why it was accepted."""
    shapes = [chain(2)] if rule.shape is Shape.CHAIN else [chain(2), TREES["ragged"]]
    for shape in shapes:
        for seed in repeats(1, of=2):
            pair = toy_pair("random", seed, 2)
            drafter = grow(pair, shape, draws, by_draws(pair, draws))
            experiment = Experiment(pair, drafter, 3, rounds=2, by_rule=rule is Coupled)
            assert distance(Cut(rule(), at_depth(depth)), experiment) < EXACT
