"""Rules that judge the independent guesses below a node together, and follow all drafts that agree with the accepted tokens.

Several drafts may spell the same tokens. The nodes that spell the accepted ones are reached together: their guesses are
independent draws from one q, so the next decision is made over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from outrider.acceptance.paths import path_of
from outrider.acceptance.residual import draw_row
from outrider.core.draft import Draws, Shape
from outrider.core.interfaces import AcceptanceRule, RowDraft
from outrider.core.random_source import RandomSource
from outrider.core.verdict import RowVerdict


class IndependentGuessesRule(AcceptanceRule, ABC):
    """Lossless for independent guesses. A subclass decides which of the guesses below a node is accepted."""

    exact_for: ClassVar = (Draws.IID,)
    shape: ClassVar = Shape.TREE
    lossless: ClassVar = True

    @abstractmethod
    def accept_row(self, row: RowDraft, end: int, guesses: Sequence[int], source: RandomSource) -> tuple[int | None, Tensor]:
        """The token accepted among the nodes ``guesses`` below ``end``, or None. With None, the next token is drawn
        from the second result, weights [V]."""

    def walk_row(self, row: RowDraft, source: RandomSource) -> RowVerdict:
        reached = [0]  # nodes that spell the accepted tokens; the first stands for all
        while True:
            end = reached[0]
            guesses = sorted(child for node in reached for child in row.children(node))
            token, owed = self.accept_row(row, end, guesses, source)
            if token is None:
                return RowVerdict(path_of(row, end), draw_row(owed, row.p[end], source), rejected=bool(row.children(end)))
            reached = [child for child in guesses if row.tokens[child] == token]
