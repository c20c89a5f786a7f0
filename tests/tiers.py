"""How often a test shows its law: a few times in ``make test``, and as often as it can in ``make test-all``."""

from __future__ import annotations

_runs_everything = False


def choose_tier(mark_expression: str) -> None:
    """``mark_expression`` is pytest's ``-m``: without the word that leaves out what is exhaustive, everything runs."""
    global _runs_everything  # noqa: PLW0603 (one per process, set before tests are collected)
    _runs_everything = "not exhaustive" not in mark_expression


def repeats(usual: int, *, of: int) -> range:
    """The first ``usual`` numbers, or all ``of`` in ``make test-all``."""
    return range(of if _runs_everything else usual)
