"""Best-first growth against listing every path."""

from __future__ import annotations

import random

import pytest

from outrider.drafters.trees.trie import Growth, Limits, best_first, follow

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


def paths_of(grown: Growth) -> list[Place]:
    paths: list[Place] = []
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("seed", range(30))
def test_the_most_probable_nodes_are_taken(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(max_depth=rng.randrange(1, 5), max_nodes=rng.randrange(1, 20), min_prob=rng.choice([0.0, 0.02]))
    found = every_path(source(seed), limits.max_depth)
    expected = sorted((prob for prob in found.values() if prob >= limits.min_prob), reverse=True)[: limits.max_nodes]
    grown = best_first((), source(seed), limits=limits)
    paths = paths_of(grown)
    assert len(set(paths)) == len(paths) == len(expected)
    assert [found[path] for path in paths] == pytest.approx(expected)
    assert grown.score == pytest.approx(sum(expected))
    tokens, parents = grown.row(99)
    assert tokens[0] == 99 and parents[0] == -1 and parents[1:] == sorted(parents[1:])
    assert sorted(tokens[1:]) == sorted(grown.tokens)


@pytest.mark.parametrize("seed", range(10))
def test_a_path_follows_the_best(seed: int) -> None:
    limits = Limits(max_depth=4, max_nodes=3, min_prob=0.001)
    grown, place = follow((), source(seed), limits=limits), ()
    assert len(grown.tokens) <= 3 and grown.row(5)[1] == list(range(-1, len(grown.tokens)))
    for token in grown.tokens:
        best, _, place = source(seed)(place)[0]
        assert token == best


def test_no_room_no_guess() -> None:
    for limits in (Limits(0, 5), Limits(5, 0), Limits(5, 5).within(0)):
        assert best_first((), source(1), limits=limits).tokens == [] == follow((), source(1), limits=limits).tokens
