"""Siblings from different drafters (Corollary B): proved by enumeration, vectorised, and drawn by real models.

``python -m pytest tests/contract/test_several_drafters.py -s`` prints the acceptance table of docs/methods/multi-draft.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from markov import Markov
from test_draft_trees import SIZE, Q, assert_law, emitted
from test_rules_exact import EXACT, TREES
from test_rules_vectorised import case_of
from tiers import repeats
from toy_laws import (
    DRAFT_LANE,
    Experiment,
    Pair,
    Text,
    ToyDrafter,
    ToyModel,
    distance,
    mean_emitted,
    random_model,
    top_k_model,
)

from outrider.acceptance import Coupled, Recursive
from outrider.core.draft import Draft, Draws
from outrider.core.interfaces import RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.verdict import RowVerdict
from outrider.drafters.mixed.multi_draft import MultiDraft
from outrider.drafters.model.draft_tree import DraftTreeOptions

BEAM, IID = Draws.BEAM, Draws.IID


def taking_turns(p: ToyModel, models: Sequence[ToyModel], parents: Sequence[int], draws: Draws) -> ToyDrafter:
    """The i-th child of a node is drawn from model i mod S; under BEAM from what its elders left of it."""

    def draft(context: Text, source: RandomSource) -> RowDraft:
        contexts, tokens, kept, index = [context], [-1], [-1], {0: 0}
        ended: set[int] = set()
        for node, parent in enumerate(parents[1:], 1):
            if parent not in index or parent in ended:
                continue
            above = index[parent]
            elders = [tokens[i] for i in range(1, len(tokens)) if kept[i] == above]
            law = models[len(elders) % len(models)](contexts[above]).clone()
            if draws is BEAM:
                law[elders] = 0
            if law.sum() <= 0:
                ended.add(parent)  # the model whose turn it is has nothing left: no later sibling either
                continue
            tokens.append(source.categorical(law, DRAFT_LANE + node))
            contexts.append((*contexts[above], tokens[-1]))
            kept.append(above)
            index[node] = len(tokens) - 1
        q = torch.stack([torch.stack([model(c) for model in models]) for c in contexts])
        return RowDraft(tokens, kept, torch.stack([p(c) for c in contexts]), q, draws)

    return draft


def models_of(seed: int, vocab_size: int, count: int, *, cut: bool = False) -> tuple[ToyModel, list[ToyModel]]:
    found = [random_model(10 * seed + i, vocab_size) for i in range(count + 1)]
    return found[0], [top_k_model(model, 2) if cut and i % 2 else model for i, model in enumerate(found[1:])]


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("draws", [BEAM, IID])
@pytest.mark.parametrize(("num_models", "cut"), [(2, False), (2, True), (3, False)])
def test_recursive_is_exact_for_siblings_of_different_drafters(shape: str, draws: Draws, num_models: int, cut: bool) -> None:
    large = len(TREES[shape]) > 5
    for seed in repeats(1, of=1 if large else 3):
        vocab_size = 2 if large else 3
        p, models = models_of(seed, vocab_size, num_models, cut=cut)
        drafter = taking_turns(p, models, TREES[shape], draws)
        assert distance(Recursive(), Experiment(Pair(p, models[0], vocab_size), drafter, 3)) < EXACT


def test_two_rounds_of_different_drafters() -> None:
    p, models = models_of(3, 2, 2)
    drafter = taking_turns(p, models, TREES["ragged"], BEAM)
    for rule in (Recursive(), Coupled()):
        assert distance(rule, Experiment(Pair(p, models[0], 2), drafter, 3, rounds=2)) < EXACT


class OneLawForAll:
    """The bug: every sibling is tested against the first drafter's law."""

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        assert row.q is not None
        return Recursive().walk_row(RowDraft(row.tokens, row.parents, row.p, row.q[:, 0], row.draws), source)


class WrongTurn:
    """The bug: turns are counted from the second drafter."""

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        assert row.q is not None
        return Recursive().walk_row(RowDraft(row.tokens, row.parents, row.p, row.q.roll(1, 1), row.draws), source)


@pytest.mark.parametrize("bug", [OneLawForAll(), WrongTurn()], ids=lambda bug: type(bug).__name__)
def test_the_check_rejects(bug) -> None:
    found = []
    for seed in range(6):
        p, models = models_of(seed, 3, 2)
        experiment = Experiment(Pair(p, models[0], 3), taking_turns(p, models, TREES["two leaves"], BEAM), 2)
        found.append(distance(bug, experiment))
    assert max(found) > 0.02


@pytest.mark.parametrize("draws", [BEAM, IID])
@pytest.mark.parametrize("num_models", [1, 2, 3])
def test_walk_is_walk_row_with_several_laws(draws: Draws, num_models: int) -> None:
    lengths = set()
    for seed in repeats(30, of=120):  # those of the other rules, made once
        case = case_of(seed, is_chain=False)
        if case.draft.q is None:
            continue
        others = [case.draft.q.roll(shift, -1) for shift in range(num_models)]
        draft = Draft(case.tree, draws, torch.stack(others, 2))
        batched = Recursive().walk(draft, case.law, case.noise)
        for row in range(len(case.sizes)):
            scalar = Recursive().walk_row(RowDraft.of(draft, case.law, row), case.sources[row])
            assert batched.rows[row] == scalar, f"seed {seed}"
            lengths.add(len(scalar.path))
    assert lengths >= {0, 1, 2}


# --- the real drafter -------------------------------------------------------------------------------------------------

OTHER = (torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3)) * 1.5).log_softmax(-1)


@pytest.mark.parametrize("branching", [(2, 2, 1), (3, 1), (1, 2)], ids=str)
def test_sampled_trees_of_two_models_keep_the_law(branching: tuple[int, ...]) -> None:
    """The rule is proved above; this is about what the drafter really draws, and hands on as q."""
    models = [Markov(Q), Markov(OTHER)]
    drafter = MultiDraft(models, DraftTreeOptions(branching), vocab_size=SIZE, draws=BEAM)
    assert_law(drafter, Recursive())


def test_models_are_asked_no_deeper_than_they_draw() -> None:
    models = [Markov(Q), Markov(OTHER)]
    drafter = MultiDraft(models, DraftTreeOptions((2, 1, 1)), vocab_size=SIZE, draws=BEAM)
    emitted(drafter, Recursive(), first_seed=1)
    assert [len(model.num_scored) for model in models] == [3, 1]


def test_two_drafters_accept_more_than_one() -> None:
    """One level of two siblings: of one model, of the other, of both in turn."""
    rows = []
    for seed in range(12):
        p, (first, second) = models_of(seed, 4, 2)
        shape = TREES["two leaves"]
        pair = Pair(p, first, 4)
        parts = ([first], [second], [first, second])
        rows.append([mean_emitted(Recursive(), Experiment(pair, taking_turns(p, who, shape, BEAM), 1)) - 1 for who in parts])
    one, other, both = torch.tensor(rows).mean(0).tolist()
    table = [("of one model", one), ("of the other", other), ("in turn", both)]
    print("\n| siblings | accepted |\n|---|---|", *(f"| {name} | {rate:.3f} |" for name, rate in table), sep="\n")
    assert both > max(one, other)
