"""Fusing drafters: one trie, one budget, and every drafter sees its own part of what happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import CompositionError, OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Stateless
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.drafters.copying.prompt_lookup import PromptLookup
from outrider.drafters.mixed.hybrid import Hybrid, SharingOptions
from outrider.drafters.mixed.source_rates import SourceRates, share

SIZE = 10


class Fixed(Drafter):
    """Proposes the beginnings of given paths that fit; writes down what it is told."""

    offers = (Draws.DETERMINISTIC, Draws.IID)
    shape = Shape.TREE

    def __init__(self, *paths: Sequence[int], draws: Draws = Draws.DETERMINISTIC) -> None:
        self.paths, self.draws = paths, draws
        self.plans: list[Plan] = []
        self.seen: list[Observation] = []

    def start(self, rows, taps: Mapping) -> Stateless:
        return Stateless()

    def propose(self, state, context: Context, plan: Plan) -> Draft:
        self.plans.append(plan)
        rows = []
        for root, nodes, depth in zip(context.roots, plan.max_nodes, plan.max_depth, strict=True):
            tokens, parents, index = [root], [-1], {(): 0}
            for path in sorted({tuple(full[: end + 1]) for full in self.paths for end in range(len(full))}, key=len):
                if len(tokens) <= nodes and len(path) <= depth:
                    index[path] = len(tokens)
                    tokens.append(path[-1])
                    parents.append(index[path[:-1]])
            rows.append((tokens, parents))
        return Draft(TokenTree.of_rows(rows), self.draws)

    def observe(self, state, observation: Observation) -> None:
        self.seen.append(observation)


def context_of(rows: int) -> Context:
    states = [RequestState.of(Request([0], SamplingParams())) for _ in range(rows)]
    noise = Noise(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    return Context([[0]] * rows, Sampler(states, SIZE, torch.device("cpu")), noise, torch.device("cpu"))


def texts_of(tree: TokenTree, row: int = 0) -> set[tuple[int, ...]]:
    tokens = tree.tokens[row].tolist()
    return {tuple(tokens[n] for n in tree.path(row, node)) for node in range(1, tree.sizes[row])}


def seen_by(drafter: Hybrid, state, draft: Draft, paths: list[list[int]]) -> None:
    scores = Scores(torch.arange(draft.tree.num_nodes).float()[None, :, None].expand(len(paths), -1, SIZE))
    drafter.observe(state, Observation(draft, scores, paths, [len(path) - 1 for path in paths], 0.0, 0.0))


def test_equal_beginnings_are_stored_once() -> None:
    fused = Hybrid([Fixed((1, 2, 3)), Fixed((1, 2, 4), (5,))])
    draft = fused.propose(fused.start([[0]], {}), context_of(1), Plan((3,), (20,)))
    assert texts_of(draft.tree) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)}
    assert draft.tree.tokens.tolist() == [[0, 1, 5, 2, 3, 4]] and draft.tree.parents.tolist() == [[-1, 0, 0, 1, 3, 3]]


def test_the_budget_holds_and_nothing_proposed_is_dropped() -> None:
    inner = [Fixed((1, 2, 3, 4, 5)), Fixed((1, 2, 9), (6, 7, 8)), Fixed((3, 3, 3))]
    for budget in range(8):
        fused = Hybrid(inner)
        draft = fused.propose(fused.start([[0]] * 2, {}), context_of(2), Plan((5, 2), (budget, 3)))
        assert draft.tree.sizes[0] <= budget + 1 and draft.tree.sizes[1] <= 4
        assert int(draft.tree.depths[1].max()) <= 2
        for drafter in inner:
            assert all(n >= 0 for n in drafter.plans[-1].max_nodes)
    assert inner[0].plans[-1].max_nodes[0] < 7, "the first drafter leaves room for the others"


def test_a_drafter_that_finds_nothing_leaves_its_places_to_the_next() -> None:
    fused = Hybrid([Fixed(), Fixed((1, 2, 3, 4, 5, 6))])
    draft = fused.propose(fused.start([[0]], {}), context_of(1), Plan((6,), (6,)))
    assert draft.tree.sizes == (7,)


def test_every_drafter_sees_its_own_tree() -> None:
    inner = [Fixed((1, 2, 3)), Fixed((1, 2, 4), (5,))]
    fused = Hybrid(inner)
    state = fused.start([[0]], {})
    draft = fused.propose(state, context_of(1), Plan((3,), (20,)))
    by_text = {
        text: node for node in range(1, 6) for text in [tuple(int(draft.tree.tokens[0, n]) for n in draft.tree.path(0, node))]
    }
    path = [0, by_text[1,], by_text[1, 2], by_text[1, 2, 4]]
    seen_by(fused, state, draft, [path])
    first, second = inner[0].seen[0], inner[1].seen[0]
    assert list(first.num_accepted) == [2] and list(second.num_accepted) == [3]
    assert [int(first.draft.tree.tokens[0, n]) for n in first.paths[0]] == [0, 1, 2]
    assert [int(second.draft.tree.tokens[0, n]) for n in second.paths[0]] == [0, 1, 2, 4]
    for seen in (first, second):  # the scores of a node are those of its place in the fused tree
        for node in range(1, seen.draft.tree.sizes[0]):
            text = tuple(int(seen.draft.tree.tokens[0, n]) for n in seen.draft.tree.path(0, node))
            assert int(seen.scores.logits[0, node, 0]) == by_text[text]


def test_the_better_drafter_comes_first_and_gets_more() -> None:
    bad, good = Fixed((7, 7, 7, 7, 7, 7)), Fixed((1, 2, 3, 4, 5, 6))
    fused = Hybrid([bad, good])
    state = fused.start([[0]], {})
    for _ in range(6):
        draft = fused.propose(state, context_of(1), Plan((6,), (6,)))
        path = [0]
        for depth in range(1, 7):
            text = (1, 2, 3, 4, 5, 6)[:depth]
            nodes = [
                n
                for n in range(1, draft.tree.sizes[0])
                if tuple(int(draft.tree.tokens[0, m]) for m in draft.tree.path(0, n)) == text
            ]
            path += nodes
        seen_by(fused, state, draft, [path])
    assert good.plans[-1].max_nodes[0] > good.plans[0].max_nodes[0]
    assert len(bad.plans) < len(good.plans), "who has no place is not even asked"


def test_who_does_not_copy_is_asked_where_no_copy_was_found() -> None:
    """Row by row. The model hears of the tokens all the same, and what is known of it fades."""
    model, copier = Fixed((1, 2, 3)), PromptLookup()
    fused = Hybrid([model, copier])
    state, context = fused.start([[0], [0]], {}), context_of(2)
    context = Context([[4, 5, 6, 7, 4, 5], [4, 5, 6, 7]], context.sampler, context.noise, context.device)
    state.rates[0][0].record(3, 3, [0, 1, 2])
    known = state.rates[0][0].made[0]
    draft = fused.propose(state, context, Plan((3, 3), (3, 3)))
    assert texts_of(draft.tree, 0) == {(6,), (6, 7), (6, 7, 4)}
    assert texts_of(draft.tree, 1) == {(1,), (1, 2), (1, 2, 3)}
    assert model.plans[-1].max_nodes == (0, 3)
    seen_by(fused, state, draft, [[0, 1], [0, 1]])
    assert [list(seen.num_accepted) for seen in model.seen] == [[0, 1]]
    assert state.rates[0][0].made[0] < known and state.rates[0][1].made[0] == state.rates[1][0].made[0] == 1


def test_who_guesses_badly_is_left_alone_for_a_while() -> None:
    """Copies stay where the model beside them is of no use, and it is tried again when its failures have faded."""
    model = Fixed((1, 2, 3))
    fused = Hybrid([model, PromptLookup()])
    state, context = fused.start([[0]], {}), context_of(1)
    for _ in range(120):
        seen_by(fused, state, fused.propose(state, context, Plan((3,), (3,))), [[0]])
    rounds = [number for number, plan in enumerate(model.plans) if any(plan.max_nodes)]
    assert 3 < len(rounds) < 30
    assert len(model.seen) == 120


def test_states_fork_and_join() -> None:
    fused = Hybrid([Fixed((1,))])
    state = fused.start([[0], [0]], {})
    state.rates[1][0].asked = 5
    assert state.fork([1]).join(state.fork([0])).rates[0][0].asked == 5
    forked = state.fork([1, 1])
    forked.rates[0][0].record(3, 1, [0])
    assert forked.rates[1][0].asked == 5 and state.rates[1][0].made == []


def test_chances_follow_what_was_accepted_and_fade() -> None:
    rates = SourceRates(20.0)
    prior = rates.chances(3)
    assert prior == pytest.approx([0.75, 0.75**2, 0.75**3])
    for _ in range(60):
        rates.record(4, 3, [0, 1])
    first, second, third, fourth = rates.chances(4)
    assert first > 0.95 and second > 0.9 and third < 0.15 and fourth < third
    for _ in range(200):  # not asked any more: forgotten, so that it will be tried again
        rates.record(0, 0, [])
    assert rates.chances(3) == pytest.approx(prior, abs=0.01)


def test_places_go_to_the_largest_chances() -> None:
    good, bad, unknown = SourceRates(50.0), SourceRates(50.0), SourceRates(50.0)
    for _ in range(100):
        good.record(8, 8, range(6))
        bad.record(8, 8, [])
    assert share(8, [good, bad], min_chance=0.0) >= 6
    assert share(8, [bad, good], min_chance=0.02) <= 2
    assert share(8, [bad, bad], min_chance=0.05) == 0, "no place for a guess that is never right"
    assert share(0, [good], min_chance=0.0) == 0
    assert share(8, [unknown, unknown], min_chance=0.0) == 4
    total = [share(8, [a, b], min_chance=0.0) for a, b in ((good, unknown), (unknown, good))]
    assert sum(total) == 8, "without ties nobody's place is counted twice"


def test_a_drafter_that_often_finds_nothing_is_asked_first() -> None:
    rarely, always = Fixed(), Fixed((1, 2, 3))
    fused = Hybrid([always, rarely], SharingOptions(min_chance=0.0, min_first_chance=0.0))
    state = fused.start([[0]], {})
    for _ in range(3):
        draft = fused.propose(state, context_of(1), Plan((3,), (3,)))
        seen_by(fused, state, draft, [[0]])
    draft = fused.propose(state, context_of(1), Plan((3,), (3,)))
    assert draft.tree.sizes == (4,), "the places it leaves empty go to the other"


def test_sampled_guesses_cannot_be_fused() -> None:
    with pytest.raises(CompositionError, match="whose guesses are chosen"):
        Hybrid([Fixed((1,), draws=Draws.IID)])


@pytest.mark.parametrize("options", [{"trust_rounds": 1}, {"min_chance": 1.0}, {"min_chance": -0.1}, {"min_first_chance": 1.0}])
def test_bad_options(options) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        SharingOptions(**options)
