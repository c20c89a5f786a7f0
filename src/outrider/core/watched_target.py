"""Targets that need other processes, and say when one of them dies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from outrider.core.interfaces import Target


class WatchedTarget(Target, ABC):
    """A target that needs other processes."""

    @abstractmethod
    def tell_loss(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` on its own thread with the name of a process this target needs, if that process dies."""
