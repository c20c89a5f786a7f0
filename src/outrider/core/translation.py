"""Between two tokenizers: what a drafter must know to guess for a target that cuts text into other tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """A text of the target's as the draft reads it."""

    num_tokens: int
    """How many of the target's tokens were read. A character that the text has only begun is not read yet."""
    ids: list[int]
    """The draft's tokens, begin-of-sequence included."""


class Translation(ABC):
    """The target's tokens as the draft model reads them, and back."""

    @abstractmethod
    def to_draft(self, tokens: Sequence[int], before: Reading | None = None) -> Reading | None:
        """How the draft reads a text of the target's, up to its last whole character; None where there is nothing to read.
        With the reading of an earlier part of the text, only its end is translated anew."""

    @abstractmethod
    def to_target(self, tokens: Sequence[int], context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens for what the draft wrote after ``context`` (the draft's reading of ``tokens``); may be fewer,
        or none where the text does not go on at a token's end, or with the bytes of the character that ``tokens`` end in."""

    @abstractmethod
    def shared(self) -> Tensor:
        """[draft's V] the target's token with the same bytes, -1 where it has none."""
