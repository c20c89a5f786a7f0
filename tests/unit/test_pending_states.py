"""States that wait to be read: laid out late, they are what laying them out at once would have given."""

from __future__ import annotations

import torch

from outrider.core.scores import StackedTaps
from outrider.drafters.heads.pending_states import PendingStates

_TAPS = (3, 1)


def _rounds(num: int) -> list[tuple[dict[int, torch.Tensor], list[list[int]]]]:
    """Rounds of two rows, two taps and three nodes."""
    generator = torch.Generator().manual_seed(3)
    paths = [[[0], [0, 2]], [[0, 1, 2], [0]], [[0, 1], [0, 1]], [[0], [0]]]
    return [({tap: torch.randn(2, 3, 4, generator=generator) for tap in _TAPS}, paths[i % 4]) for i in range(num)]


def _at_once(rounds, row: int) -> torch.Tensor:
    return torch.cat([torch.cat([taps[tap][row, path[row]] for tap in _TAPS], -1) for taps, path in rounds])


def test_rounds_are_read_in_order():
    rounds = _rounds(4)
    unread = PendingStates([torch.zeros(0, 8)] * 2, _TAPS)
    for i, (taps, paths) in enumerate(rounds):
        unread.note(taps, paths)
        if i == 1:
            assert [len(row) for row in unread.rows] == [4, 3]
    for row in range(2):
        assert torch.equal(unread.rows[row], _at_once(rounds, row))
    unread.drop([2, 0])
    assert torch.equal(unread.rows[0], _at_once(rounds, 0)[2:]) and len(unread.rows[1]) == 6


def test_only_the_newest_are_kept_where_only_they_matter():
    rounds, unread = _rounds(4), PendingStates([torch.ones(5, 8)] * 2, _TAPS, num_kept=2)
    for taps, paths in rounds:
        unread.note(taps, paths)
    assert len(unread._noted) == 2
    for row in range(2):
        assert torch.equal(unread.rows[row], _at_once(rounds, row)[-2:])


def test_rows_that_come_and_go_keep_what_was_noted():
    rounds, unread = _rounds(2), PendingStates([torch.zeros(0, 8)] * 2, _TAPS)
    for taps, paths in rounds:
        unread.note(taps, paths)
    moved = unread.fork([1]).join(unread)
    assert [len(row) for row in moved.rows] == [3, 4, 3]
    assert torch.equal(moved.rows[0], _at_once(rounds, 1)) and torch.equal(moved.rows[1], _at_once(rounds, 0))


def test_states_take_the_type_of_what_was_there():
    unread = PendingStates([torch.zeros(1, 4, dtype=torch.bfloat16)], (5,))
    unread.note({5: torch.ones(1, 2, 4)}, [[0, 1]])
    assert unread.rows[0].dtype == torch.bfloat16 and len(unread.rows[0]) == 3


def test_stacked_taps_are_what_cutting_them_at_once_would_have_given():
    states = torch.randn(2, 1, 3, 4)
    taps = StackedTaps([7, 2], states, torch.bfloat16)
    assert list(taps) == [7, 2] and len(taps) == 2 and 3 not in taps
    for tap, cut in zip((7, 2), states, strict=True):
        assert torch.equal(taps[tap], cut.to(torch.bfloat16))
