"""Memory that outlives requests: the one part of a drafter that changes.

Drafters are frozen, and what evolves belongs to a request and dies with it. Some drafters also learn across requests: which
texts were said, what follows a token, which layers can be skipped. Such knowledge is an object of its own, handed to the
drafter when it is built, and it may be shared by several drafters.

A memory changes what is guessed, never the text. But speed reveals whether a text was generated before, so requests
that must not learn of each other need separate memories.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class LastingMemory(ABC):
    """What a drafter has learned from all requests so far."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while writing, and while reading several values that must be consistent."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, as if newly made."""
