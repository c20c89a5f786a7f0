"""Translation between two tokenizers, for a draft model that splits text into other tokens than the target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftReading:
    """The draft's tokenization of the target's text."""

    num_tokens: int
    """Number of the target's tokens that were read. An incomplete character is not read yet."""
    ids: list[int]
    """The draft's tokens, begin-of-sequence included."""


class Translation(ABC):
    """Translates the target's tokens for the draft model, and back."""

    @abstractmethod
    def to_draft(self, tokens: Sequence[int], before: DraftReading | None = None) -> DraftReading | None:
        """The draft's reading of the target's text, up to its last whole character; None if there is nothing to read.
        With ``before``, the reading of an earlier part, only the end is translated again."""

    @abstractmethod
    def to_target(self, tokens: Sequence[int], context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens for what the draft wrote after ``context``, the draft's reading of ``tokens``. The
        result may be shorter, or empty if the text does not continue at a token boundary or with the bytes of the
        character that ``tokens`` end in.
        """

    @abstractmethod
    def shared(self) -> Tensor:
        """[draft's V] the target's token with the same bytes, -1 where it has none."""
