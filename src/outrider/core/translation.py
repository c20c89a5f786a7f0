"""Between two tokenizers: what a drafter must know to guess for a target that cuts text into other tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Translation(ABC):
    """The target's tokens as the draft model reads them, and back."""

    @abstractmethod
    def to_draft(self, tokens: Sequence[int]) -> list[int] | None:
        """The draft's tokens for a text of the target's, begin-of-sequence included; None inside a character."""

    @abstractmethod
    def to_target(self, tokens: Sequence[int], context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens for what the draft wrote after ``context`` (the draft's tokens of ``tokens``); may be fewer,
        or none where the text does not go on at a token's end."""

    @abstractmethod
    def shared(self) -> Tensor:
        """[draft's V] the target's token with the same bytes, -1 where it has none."""
