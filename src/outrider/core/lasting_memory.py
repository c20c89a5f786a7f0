"""Memory that outlives requests: the one part of a drafter that changes.

Drafters are frozen, and what evolves belongs to a request and dies with it. Some drafters also learn across requests: which
texts were said, what follows a token, which layers can be skipped. Such knowledge is an object of its own, handed to the
drafter when it is built, and it may be shared by several drafters.

A memory decides only what is guessed, never what is said. But how fast a text comes tells whether it was said before, so
requests that must not learn of each other need memories of their own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class LastingMemory(ABC):
    """What a drafter has learned from all requests so far."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by whoever writes, and by whoever reads several things that must fit together."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything: the memory is then as it was when it was made."""
