"""The trie of guesses: shared beginnings, limits, and best-first growth against listing every path."""

from __future__ import annotations

import random

import pytest

from outrider.core.tree import TokenTree
from outrider.drafters.trees.trie import Limits, Trie, best_first, follow

Place = tuple[int, ...]


def source(seed: int, width: int = 3):
    """A random law after every path, best first, that need not add up to 1."""

    def continuations(place: Place) -> list[tuple[int, float, Place]]:
        rng = random.Random(hash((seed, place)))
        chances = sorted((rng.random() / width for _ in range(rng.randrange(width + 1))), reverse=True)
        return [(token, chance, (*place, token)) for token, chance in enumerate(chances)]

    return continuations


def every_path(continuations, max_depth: int) -> dict[Place, float]:
    found, level = {}, {(): 1.0}
    for _ in range(max_depth):
        level = {after: prob * chance for place, prob in level.items() for _, chance, after in continuations(place)}
        found.update(level)
    return found


def paths_of(grown: Trie) -> list[Place]:
    paths: list[Place] = [()]
    for token, parent in zip(grown.tokens[1:], grown.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("seed", range(30))
def test_the_most_probable_nodes_are_taken(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(max_depth=rng.randrange(1, 5), max_nodes=rng.randrange(1, 20), min_prob=rng.choice([0.0, 0.02]))
    found = every_path(source(seed), limits.max_depth)
    expected = sorted((prob for prob in found.values() if prob >= limits.min_prob), reverse=True)[: limits.max_nodes]
    grown = best_first(Trie(99), (), source(seed), limits=limits)
    paths = paths_of(grown)
    assert len(set(paths)) == len(paths) == len(expected)
    assert [found[path] for path in paths] == pytest.approx(expected)
    assert grown.score == pytest.approx(sum(expected))
    tokens, parents = grown.row()
    assert tokens[0] == 99 and parents[0] == -1 and parents[1:] == sorted(parents[1:])
    assert sorted(tokens) == sorted(grown.tokens)


@pytest.mark.parametrize("seed", range(10))
def test_a_path_follows_the_best(seed: int) -> None:
    limits = Limits(max_depth=4, max_nodes=3, min_prob=0.001)
    grown, place = follow(Trie(5), (), source(seed), limits=limits), ()
    assert grown.num_guesses <= 3 and grown.row() == (grown.tokens, list(range(-1, grown.num_guesses)))
    for token in grown.tokens[1:]:
        best, _, place = source(seed)(place)[0]
        assert token == best


def test_no_room_no_guess() -> None:
    for limits in (Limits(0, 5), Limits(5, 0), Limits(5, 5).within(0)):
        assert best_first(Trie(5), (), source(1), limits=limits).tokens == [5]
        assert follow(Trie(5), (), source(1), limits=limits).tokens == [5]


def test_paths_share_their_beginnings() -> None:
    rng, limits = random.Random(1), Limits(max_depth=4, max_nodes=999)
    paths = [[rng.randrange(3) for _ in range(rng.randrange(6))] for _ in range(20)]
    trie = Trie(5)
    ends = [[0, *trie.add_path(path, limits)][-1] for path in paths]
    order = trie.breadth_first()
    tokens, parents = trie.row(order)
    flat = TokenTree.of_rows([(tokens, parents)])
    assert flat.depths[0].tolist() == sorted(flat.depths[0].tolist())
    found = [tuple(tokens[n] for n in flat.path(0, node)) for node in range(len(tokens))]
    assert len(set(found)) == len(found)
    assert set(found) == {tuple(path[:size]) for path in paths for size in range(min(len(path), 4) + 1)}
    assert [found[order.index(end)] for end in ends] == [tuple(path[:4]) for path in paths]


def test_a_full_tree_takes_no_more() -> None:
    trie, limits = Trie(0), Limits(max_depth=2, max_nodes=3)
    assert trie.add_path([1, 2, 3], limits) == [1, 2]
    assert trie.fits([1, 4], limits) and not trie.fits([4, 4], limits) and not trie.fits([1, 2, 3], limits)
    assert trie.fits([1, 2], limits) and trie.fits([], limits)
    assert trie.add_path([4, 4], limits) == [3] and trie.add_path([5], limits) == [] and trie.add_path([1, 2], limits) == [1, 2]
    assert trie.num_guesses == 3


def test_trees_merge_and_the_likeliest_nodes_are_kept() -> None:
    trie = Trie(7)
    first = TokenTree.of_rows([([7, 1, 2, 3], [-1, 0, 0, 1])])
    assert trie.add_tree(first, 0, [1.0, 0.5, 0.3, 0.2]) == [0, 1, 2, 3]
    second = TokenTree.of_rows([([7, 2, 4], [-1, 0, 1])])
    assert trie.add_tree(second, 0, [1.0, 0.4, 0.35]) == [0, 2, 4]
    assert trie.chances[2] == 0.4 and trie.score == pytest.approx(0.5 + 0.4 + 0.2 + 0.35)
    assert trie.likeliest(Limits(max_depth=2, max_nodes=3)) == [1, 2, 4]
    assert trie.likeliest(Limits(max_depth=1, max_nodes=3)) == [1, 2]
    assert trie.row(trie.breadth_first([4, 2, 1])) == ([7, 1, 2, 4], [-1, 0, 0, 2])
