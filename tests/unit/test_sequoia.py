"""Sequoia's dynamic programme against every tree there is, and the counting of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from outrider.core.draft import Draft, Draws
from outrider.core.errors import OptionError
from outrider.core.interfaces import Observation
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.drafters.model.sequoia import RankCounts, SequoiaOptions, best_tree
from outrider.drafters.trees.shape import RankPath, TreeShape


def all_trees(num_nodes: int, num_ranks: int, max_depth: int) -> set[frozenset[RankPath]]:
    """Every set of rank paths closed under parent and elder sibling."""
    trees, found = {frozenset[RankPath]()}, {frozenset[RankPath]()}
    for _ in range(num_nodes):
        trees = {tree | {path} for tree in trees for path in openings(tree, num_ranks, max_depth)}
        found |= trees
    return found


def openings(tree: frozenset[RankPath], num_ranks: int, max_depth: int) -> list[RankPath]:
    parents = [(), *tree]
    wanted = [(*path, sum(1 for other in tree if other[:-1] == path and other)) for path in parents if len(path) < max_depth]
    return [path for path in wanted if path[-1] < num_ranks]


def expected_accepted(tree: TreeShape, by_rank: Sequence[float]) -> float:
    """Sum over the guesses of the product of p along their paths."""
    reach: dict[RankPath, float] = {(): 1.0}
    for path in tree.paths[1:]:
        reach[path] = reach[path[:-1]] * (by_rank[path[-1]] if path[-1] < len(by_rank) else 0.0)
    return sum(reach.values()) - 1


@pytest.mark.parametrize("max_depth", [1, 2, 3, 6])
def test_the_best_tree_is_the_best_of_all(max_depth: int) -> None:
    chance = random.Random(max_depth)
    for _ in range(6):
        weights = [chance.random() for _ in range(4)]
        by_rank = tuple(weight / sum(weights) for weight in weights[:3])  # not sorted: a later sibling may be the likelier
        for num_nodes in range(1, 7):
            best = max(expected_accepted(TreeShape.of_paths(tree), by_rank) for tree in all_trees(num_nodes, 3, max_depth))
            tree = best_tree(by_rank, num_nodes, max_depth=max_depth)
            assert tree.num_nodes <= num_nodes and tree.max_depth <= max_depth
            assert expected_accepted(tree, by_rank) == pytest.approx(best)


def test_good_guesses_make_deep_trees_and_bad_ones_wide() -> None:
    assert best_tree((0.95, 0.02), 6, max_depth=9).is_chain
    assert best_tree((0.3, 0.29, 0.28), 3, max_depth=9).max_depth == 1


def test_ranks_are_counted_where_there_was_a_choice() -> None:
    tree = TokenTree.of_rows([([0, 1, 2, 3, 4], [-1, 0, 0, 1, 1]), ([0, 5], [-1, 0])])
    counts = RankCounts()
    scores = Scores(torch.zeros(2, 5, 9))
    counts.add(Observation(Draft(tree, Draws.DETERMINISTIC), scores, [[0, 1, 4], [0]], [2, 0], 0.0, 0.0))
    assert counts.offered == [3, 2]  # the root and node 1 of the first row, the root of the second
    assert counts.accepted == [1, 1]
    assert counts.by_rank == (1 / 3, 1 / 2)


def test_options() -> None:
    assert SequoiaOptions(num_nodes=8).tree.num_nodes == 8
    for bad in ({"num_nodes": 0}, {"max_depth": 0}, {"by_rank": ()}, {"by_rank": (0.9, 0.9)}):
        with pytest.raises(OptionError):
            SequoiaOptions(**bad)
