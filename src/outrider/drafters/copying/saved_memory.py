"""A lasting memory of tokens that can be given in three ways: as an object, as the file of a saved one, or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from outrider.core.errors import ModelError
from outrider.core.lasting_memory import LastingMemory


class SavedMemory(LastingMemory, ABC):
    """A memory of one vocabulary that can be written to a file."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write everything that is remembered to one file."""


Memory = TypeVar("Memory", bound=SavedMemory)


def memory_of(
    given: Memory | str | None, *, vocab_size: int, new: Callable[[], Memory], load: Callable[[str], Memory]
) -> Memory:
    """The memory for a user's option. One learned with another vocabulary is refused."""
    memory = given if isinstance(given, SavedMemory) else load(given) if given else new()
    if memory.vocab_size != vocab_size:
        raise ModelError(
            f"this memory was learned with a vocabulary of {memory.vocab_size} tokens and the model has {vocab_size}; "
            "use a memory of the same model family"
        )
    return memory
