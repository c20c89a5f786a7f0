"""Targets that read prompts in the passes that score trees, so that weights are read once for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from outrider.core.interfaces import Cache, Target
from outrider.core.resume import Resume
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree


@dataclass(eq=False)
class PromptPiece:
    """The next tokens of prompts that are read together: a chain of nodes that are all accepted."""

    rows: Sequence[Sequence[int]]
    """Tokens of each row of the cache."""
    cache: Cache
    taps: tuple[int, ...] = ()
    """Layers whose states are wanted."""
    states: Mapping[int, list[Tensor]] | None = None
    """The tapped states [n, H] of each row, by layer; None until the piece was read."""
    seconds: float = 0.0
    """The part of the round's time that reading this piece took."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))


class ReadingTarget(Target, ABC):
    """A target whose passes can read pieces of prompts beside trees. A piece costs no more than its tokens."""

    most_read: int
    """Most tokens of a row that one pass should read."""

    @final
    def score_and_read(
        self,
        tree: TokenTree,
        cache: Cache,
        pieces: Sequence[PromptPiece],
        *,
        taps: Sequence[int] = (),
        resume: Resume | None = None,
    ) -> Scores:
        """Score the trees, and read the pieces. Commits the pieces to their caches, and nothing of the trees. A pass that
        resumes after the first layers cannot read pieces; they then get a pass of their own."""
        if resume is None:
            return self.score_beside(tree, cache, pieces, taps=taps)
        scores = self.score(tree, cache, taps=taps, resume=resume)
        for piece in pieces:
            piece.states = self.prefill(piece.rows, piece.cache, taps=piece.taps)
        return scores

    @abstractmethod
    def score_beside(self, tree: TokenTree, cache: Cache, pieces: Sequence[PromptPiece], *, taps: Sequence[int] = ()) -> Scores:
        """Score the trees and read the pieces in one pass."""
