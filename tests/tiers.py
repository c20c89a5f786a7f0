"""How often a test shows its law: a few times in ``make test``, and as often as it can in ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_runs_everything = False


def choose_tier(mark_expression: str) -> None:
    """``mark_expression`` is pytest's ``-m``: without the word that leaves out what is exhaustive, everything runs."""
    global _runs_everything  # noqa: PLW0603 (one per process, set before tests are collected)
    _runs_everything = "not exhaustive" not in mark_expression


def repeats(usual: int, *, of: int) -> range:
    """The first ``usual`` numbers, or all ``of`` in ``make test-all``."""
    return range(of if _runs_everything else usual)


def in_turn(names: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Parameters: every name with every other one. ``make test`` has one of the others for each name, in turn.

    Each time round the turns are shifted by one, so that names which come in groups of as many meet different ones.
    """
    count = len(others)
    return [
        pytest.param(name, other, marks=() if index == (turn + turn // count) % count else pytest.mark.exhaustive)
        for turn, name in enumerate(names)
        for index, other in enumerate(others)
    ]
