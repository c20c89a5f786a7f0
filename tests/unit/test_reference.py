"""Copying from references against looking at every place."""

from __future__ import annotations

import random

import pytest
from drafting import propose, start

from outrider.core.errors import OptionError
from outrider.drafters.copying.reference import ReferenceLookup, ReferenceOptions


def drafter_of(references, **options) -> ReferenceLookup:
    return ReferenceLookup(ReferenceOptions(references=references, **options), vocab_size=1000)


def copy_by_hand(history: list[int], references: list[list[int]], *, sizes: range, length: int) -> list[int]:
    """Longest first; the request's own tokens before the documents, later documents and later places first."""
    for size in sizes:
        if size > len(history):
            continue
        end = history[-size:]
        for place in range(len(history) - 1, size - 1, -1):
            if history[place - size : place] == end:
                copied = history[place : place + length]
                while len(copied) < length:
                    copied.append((history + copied)[place + len(copied)])
                return copied
        for document in reversed(references):
            for place in range(len(document) - 1, size - 1, -1):
                if document[place - size : place] == end:
                    return document[place : place + length]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_and_latest_match_is_copied(seed: int) -> None:
    rng = random.Random(seed)
    alphabet, top, bottom = rng.choice([3, 8, 20]), rng.choice([2, 4, 6]), rng.choice([1, 2])
    references = [[rng.randrange(alphabet) for _ in range(rng.randrange(40))] for _ in range(4)]
    drafter = drafter_of(references, max_ngram=top, min_ngram=bottom)
    histories = [[rng.randrange(alphabet) for _ in range(rng.randrange(1, 12))] for _ in range(3)]
    state = start(drafter, histories)
    for _ in range(20):
        lengths = [rng.randrange(7) for _ in histories]
        rows = propose(drafter, state, histories, lengths, lengths)
        for (tokens, _), history, length in zip(rows, histories, lengths, strict=True):
            expected = copy_by_hand(history, references, sizes=range(top, bottom - 1, -1), length=length) if length else []
            assert tokens[1:] == expected
        histories = [[*history, *(rng.randrange(alphabet) for _ in range(rng.randrange(1, 4)))] for history in histories]


def test_no_copy_crosses_from_one_document_into_the_next() -> None:
    drafter = drafter_of([[1, 2, 3], [4, 5, 6]], max_ngram=4)
    for history, expected in (([1], [1, 2, 3]), ([2, 3], [3]), ([4], [4, 5, 6]), ([3, 4], [4, 5, 6])):
        assert propose(drafter, start(drafter, [history]), [history], [8], [8])[0][0] == expected


def test_the_end_of_a_document_does_not_hide_an_earlier_match() -> None:
    drafter = drafter_of([[1, 2, 3, 4, 1, 2]])
    assert propose(drafter, start(drafter, [[1, 2]]), [[1, 2]], [2], [2])[0][0] == [2, 3, 4]


def test_without_references_it_is_prompt_lookup() -> None:
    drafter = drafter_of([])
    history = [1, 2, 3, 9, 1, 2]
    assert propose(drafter, start(drafter, [history]), [history], [3], [2])[0][0] == [2, 3, 9]
    assert propose(drafter, start(drafter, [[7]]), [[7]], [3], [3])[0][0] == [7]


def test_rows_leave_fork_and_arrive() -> None:
    drafter = drafter_of([[30, 31, 32]])
    a, b = [1, 2, 3], [4, 5, 6]
    state = start(drafter, [a, b]).fork([1, 1]).join(start(drafter, [a]))
    histories = [[*b, 4, 7, 4], [*b, 4], [*a, 30]]
    rows = propose(drafter, state, histories, [2] * 3, [2] * 3)
    assert [tokens for tokens, _ in rows] == [[4, 7, 4], [4, 5, 6], [30, 31, 32]]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"references": ["text"]}, "encode it"),
        ({"references": [[1, 2], [3, -1]]}, "reference 2"),
        ({"references": [[1.5]]}, "reference 1"),
        ({"references": [[1000]]}, "vocabulary is 0 to 999"),
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram"),
    ],
)
def test_bad_options_are_refused(options, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        ReferenceLookup(ReferenceOptions(**options), vocab_size=1000)
