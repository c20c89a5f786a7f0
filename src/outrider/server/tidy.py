"""Memory after large requests: it is returned to the system a moment after they were read."""

from __future__ import annotations

import asyncio
from typing import final

from outrider.core.allocator import give_back

_LARGE = 1_000_000
"""Bytes of request bodies between two returns of memory."""
_WAIT_S = 2.0


@final
class Tidy:
    """Counts bytes of request bodies. For one event loop; the work runs on a thread, once for several requests."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def count(self, num_bytes: int) -> None:
        """Count a body of ``num_bytes``."""
        is_due, self._num_bytes = self._num_bytes >= _LARGE, self._num_bytes + num_bytes
        if self._num_bytes >= _LARGE and not is_due:
            asyncio.get_running_loop().call_later(_WAIT_S, self._begin)

    def _begin(self) -> None:
        self._num_bytes = 0
        asyncio.get_running_loop().run_in_executor(None, give_back)
