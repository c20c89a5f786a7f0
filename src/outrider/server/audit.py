"""The audit log: a line of JSON for every request with a key, in a separate file. It never holds the text.

Lines are written by a thread, so that a slow disk delays nobody. A disk that is full costs lines, which are counted in the log,
and no request.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from outrider.core.errors import OptionError

_LOG = logging.getLogger("outrider.server")
_MOST_WAITING = 10_000


@final
class AuditLog:
    """A log file of requests. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lines = path, queue.Queue[str | None](_MOST_WAITING)
        self.num_lost = 0
        self._thread: threading.Thread | None = None
        if path is not None:
            try:
                path.open("a").close()
            except OSError as error:
                raise OptionError(f"the audit log {path} cannot be written ({error.strerror}); correct --audit-log") from None
            self._thread = threading.Thread(target=self._write, name="outrider-audit", daemon=True)
            self._thread.start()

    def note(self, entry: dict[str, Any]) -> None:
        if self._thread is None:
            return
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry}
        try:
            self._lines.put_nowait(json.dumps(line, ensure_ascii=False))
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        """Write the waiting lines."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(10.0)
            self._thread = None

    def _write(self) -> None:
        assert self._path is not None
        while (line := self._lines.get()) is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:  # opened each time: the file may be moved away
                    file.write(line + "\n")
            except OSError as error:
                self.num_lost += 1
                _LOG.error("the audit log lost a line (%s), %d in all", error.strerror, self.num_lost)
