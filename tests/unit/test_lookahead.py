"""Lookahead against the method as the paper's figure shows it: rows, columns, an n-gram per column, a pool per first token."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.core.draft import Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Observation, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.drafters.itself.lookahead import Lookahead, LookaheadOptions, NgramPool

VOCAB = 7
CPU = torch.device("cpu")


def context_of(rows: list[list[int]]) -> Context:
    states = [RequestState.of(Request(row, SamplingParams(seed=0))) for row in rows]
    return Context(rows, Sampler(states, VOCAB, CPU), Noise(torch.zeros(len(rows)).long(), torch.zeros(len(rows)).long()), CPU)


def say(prefix: list[int]) -> int:
    """The toy target: its choice depends on the last three tokens and the length, so that contexts matter."""
    return random.Random(str((prefix[-3:], len(prefix) % 2))).randrange(VOCAB)


def score(tree: TokenTree, rows: list[list[int]]) -> Scores:
    logits = torch.zeros(tree.batch_size, tree.num_nodes, VOCAB)
    for row, history in enumerate(rows):
        for node in range(tree.sizes[row]):
            path = [int(tree.tokens[row, n]) for n in tree.path(row, node)]
            logits[row, node, say([*history, *path])] = 1
    return Scores(logits)


def walk(tree: TokenTree, scores: Scores, row: int) -> list[int]:
    """Nodes of the greedy path, the root first."""
    path, choices = [0], scores.logits[row].argmax(-1).tolist()
    while True:
        children = [n for n in range(1, tree.sizes[row]) if int(tree.parents[row, n]) == path[-1]]
        hits = [n for n in children if int(tree.tokens[row, n]) == choices[path[-1]]]
        assert len(hits) <= 1, "no duplicate siblings"
        if not hits:
            return path
        path.append(hits[0])


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_the_pool_keeps_the_newest_of_each_first_token() -> None:
    pool, oracle, source = NgramPool(3), dict[int, list[tuple[int, ...]]](), random.Random(0)
    for _ in range(300):
        ngram = [source.randrange(3) for _ in range(4)]
        pool.add(ngram)
        kept = [rest for rest in oracle.get(ngram[0], []) if rest != tuple(ngram[1:])]
        oracle[ngram[0]] = [*kept, tuple(ngram[1:])][-3:]
        assert all(pool.guesses(token) == oracle.get(token, [])[::-1] for token in range(4))
    twin = pool.copy()
    twin.add([0, 9, 9, 9])
    assert pool.guesses(0) == oracle[0][::-1] != twin.guesses(0)


# --- the window -------------------------------------------------------------------------------------------------------


class Figure:
    """Rows 0..N-2 of the window with the current token in the first place, moved by the rules of the card."""

    def __init__(self, rows: list[list[int]], num_rows: int) -> None:
        self.rows, self.num_rows = rows, num_rows
        self.ngrams: list[tuple[int, ...]] = []

    def step(self, history: list[int]) -> None:
        rows = [[history[-1], *self.rows[0][1:]], *self.rows[1:]]
        new = []
        for j in range(len(rows[0])):
            seen = [*rows[0][1 : j + 1], *(row[j] for row in rows[1:])]  # row 0 up to column j, then down the column
            new.append(say([*history, *seen]))
        if len(rows) == self.num_rows:
            self.ngrams += [(*(row[j] for row in rows), new[j]) for j in range(len(new))]
            self.rows = [rows[1], *rows[2:], new] if len(rows) > 1 else [new]
        else:
            self.rows = [row[1:] for row in [*rows, new]]


@pytest.mark.parametrize(("window", "ngram"), [(4, 4), (1, 3), (5, 2), (3, 5)])
def test_window_and_ngrams_are_those_of_the_figure(window: int, ngram: int) -> None:
    drafter = Lookahead(LookaheadOptions(window=window, ngram=ngram, max_guesses=999, pool_text=False))
    histories = [[1, 2, 3], [4]]
    state = drafter.start(histories, {})
    figures = [Figure([list(level) for level in row.levels], ngram - 1) for row in state.rows]
    assert [len(row.levels[0]) for row in state.rows] == [window + ngram - 2] * 2
    for _ in range(12):
        draft = drafter.propose(state, context_of(histories), Plan((99, 99), (999, 999)))
        scores = score(draft.tree, histories)
        for row, figure in enumerate(figures):
            figure.step(histories[row])
        paths = [walk(draft.tree, scores, row) for row in range(2)]
        drafter.observe(state, Observation(draft, scores, paths, [len(path) - 1 for path in paths], 0.0, 0.0))
        for row, path in enumerate(paths):
            emitted = [int(draft.tree.tokens[row, node]) for node in path[1:]]
            histories[row] += [*emitted, say([*histories[row], *emitted])]
            assert state.rows[row].levels == figures[row].rows
            pooled = {(token, *rest) for token, kept in state.rows[row].pool.entries.items() for rest in kept}
            assert pooled == set(figures[row].ngrams)
    assert [len(row.levels) for row in state.rows] == [ngram - 1] * 2
    assert all(len(level) == window for row in state.rows for level in row.levels)


def test_guesses_and_columns_are_all_in_the_tree() -> None:
    drafter = Lookahead(LookaheadOptions(window=3, ngram=4, max_guesses=2, pool_text=False))
    state = drafter.start([[1]], {})
    row = state.rows[0]
    row.levels = [[0, 2, 3], [4, 5, 6], [1, 2, 3]]
    for ngram in ([1, 6, 6, 6], [1, 4, 1, 5], [1, 4, 1, 0], [2, 2, 2, 2]):
        row.pool.add(ngram)
    draft = drafter.propose(state, context_of([[9 % VOCAB, 1]]), Plan((9,), (99,)))
    tree = draft.tree
    found = {tuple(int(tree.tokens[0, n]) for n in tree.path(0, node)): node for node in range(tree.sizes[0])}
    guesses, columns = [(4, 1, 0), (4, 1, 5)], [(4, 1), (2, 5, 2), (2, 3, 6, 3)]
    assert set(found) == {path[:size] for path in [*guesses, *columns] for size in range(len(path) + 1)}
    assert row.ends == [found[column] for column in columns]  # (4, 1) is shared: a guess and a column
    assert draft.draws is Draws.DETERMINISTIC and tree.depths[0].tolist() == sorted(tree.depths[0].tolist())


def test_a_plan_cuts_guesses_and_whole_columns() -> None:
    drafter = Lookahead(LookaheadOptions(window=4, ngram=4, pool_text=False))
    for depth, nodes in ((0, 0), (1, 5), (3, 4), (5, 9), (2, 99)):
        state = drafter.start([[1, 2], [3]], {})
        for row in state.rows:
            row.levels = [[0, 2, 3, 4], [4, 5, 6, 0], [1, 2, 3, 0]]
            row.pool.add([row.levels[0][1], 1, 1, 1])
        histories = [[1, 2], [3, 2]]
        draft = drafter.propose(state, context_of(histories), Plan((depth, 9), (nodes, 99)))
        assert draft.tree.sizes[0] <= nodes + 1 and int(draft.tree.depths[0, : draft.tree.sizes[0]].max()) <= depth
        before = [list(level) for level in state.rows[0].levels]
        ends = list(state.rows[0].ends)
        drafter.observe(state, Observation(draft, score(draft.tree, histories), [[0], [0]], [0, 0], 0.0, 0.0))
        after = state.rows[0].levels
        if all(end < 0 for end in ends):
            assert after == before, "nothing was scored, nothing moves"
        else:
            last = [say([1, 2, *_column(before, j)]) if end >= 0 else before[-1][j] for j, end in enumerate(ends)]
            assert after == [*before[1:], last]
        num_learned = sum(len(kept) for kept in state.rows[0].pool.entries.values()) - 1
        assert num_learned <= sum(end >= 0 for end in ends)


def _column(levels: list[list[int]], j: int) -> list[int]:
    return [*levels[0][1 : j + 1], *(level[j] for level in levels[1:])]


def test_the_text_feeds_the_pool_when_asked() -> None:
    drafter = Lookahead(LookaheadOptions(window=2, ngram=3))
    state = drafter.start([[1, 2, 3, 1, 2, 4]], {})
    drafter.propose(state, context_of([[1, 2, 3, 1, 2, 4]]), Plan((5,), (50,)))
    assert state.rows[0].pool.entries == {1: {(2, 3): None, (2, 4): None}, 2: {(3, 1): None}, 3: {(1, 2): None}}
    drafter.propose(state, context_of([[1, 2, 3, 1, 2, 4, 1]]), Plan((5,), (50,)))
    assert state.rows[0].pool.guesses(2) == [(4, 1), (3, 1)]


def test_rows_leave_repeat_and_arrive() -> None:
    drafter = Lookahead(LookaheadOptions(window=2, ngram=3))
    state = drafter.start([[1], [2]], {})
    forked = state.fork([1, 1]).join(drafter.start([[3]], {}))
    forked.rows[0].pool.add([1, 2, 3])
    forked.rows[0].levels[0][0] = 99
    assert forked.rows[1].pool.guesses(1) == [] and forked.rows[1].levels[0][0] == 2 and len(forked.rows) == 3
    assert forked.rows[0] is state.rows[1]


@pytest.mark.parametrize("options", [{"window": 0}, {"ngram": 1}, {"max_guesses": 0}, {"window": 1.5}])
def test_bad_options_are_refused(options) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        LookaheadOptions(**options)
