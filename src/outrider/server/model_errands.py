"""Errands: work that needs the model but generates no text. The engine's thread does it piece by piece, between rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, final

from outrider.server.failures import ApiError


@final
@dataclass(eq=False)
class Errand:
    """A piece of work, and the future of whoever waits for it."""

    work: Generator[bool, None, Any]
    """Yields between two pieces whether other work may be done first, because it holds no memory, and returns the result."""
    result: asyncio.Future[Any]
    can_wait: bool = False
    """Whether other work may be done first."""

    def advance(self, explain: Callable[[Exception], ApiError]) -> bool:
        """Do the next piece on the engine's thread. True if the work is done or nobody waits for it."""
        try:
            if not self.result.cancelled():
                self.can_wait = next(self.work)
                return False
        except StopIteration as done:
            self._tell(self.result.set_result, done.value)
        except Exception as error:
            self._tell(self.result.set_exception, explain(error))
        return True

    def fail(self, error: ApiError) -> None:
        """Fail with ``error``."""
        self._tell(self.result.set_exception, error)

    def _tell(self, how: Callable[[Any], None], what: Any) -> None:
        def told() -> None:
            if not self.result.done():
                how(what)

        try:
            self.result.get_loop().call_soon_threadsafe(told)
        except RuntimeError:  # its loop is closed: nobody waits any more
            return
