"""Logs: one JSON object per line from everything in the process, with a limit on repeated lines.

A process without free file descriptors repeats one message a thousand times a second. Such a message is written a few times and
then only counted. The count is written with the next message of that kind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, final

_BURST = 5
"""Most lines of one kind in a window."""
_WINDOW_S = 10.0
_MOST_KINDS = 512


@final
class JsonLines(logging.Formatter):
    """Formats a JSON object per line. Messages that are JSON objects are merged in."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        body = json.loads(message) if message.startswith("{") and record.name.startswith("outrider") else {"event": message}
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": record.levelname.lower(), **body}
        if record.name.partition(".")[0] != "outrider":
            line["logger"] = record.name
        skipped = vars(record).get("num_skipped")
        if skipped:
            line["skipped"] = skipped
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@final
class Sparse(logging.Filter):
    """Lets a few lines of a kind through in every window. A kind is a logger, a level and a place in the code.
    Informational lines always pass, since one per request is not repetition."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str, int], tuple[float, int, int]] = {}
        """Start of the window, lines in it, and skipped lines, by kind."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.INFO:
            return True
        kind, now = (record.name, record.levelno, record.pathname, record.lineno), self._clock()
        began, count, skipped = self._seen.pop(kind, (now, 0, 0))
        if now - began >= _WINDOW_S:
            began, count = now, 0
        is_written = count < _BURST
        if is_written:
            vars(record)["num_skipped"] = skipped
        self._seen[kind] = began, count + 1, 0 if is_written else skipped + 1
        if len(self._seen) > _MOST_KINDS:
            del self._seen[next(iter(self._seen))]
        return is_written


def log_as_json(level: str = "info") -> None:
    """Make all loggers of the process write JSON. Libraries log only warnings and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    handler.addFilter(Sparse())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    ours = logging.getLogger("outrider")
    ours.handlers, ours.propagate = [], True
    ours.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).handlers = []
    logging.captureWarnings(True)


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log uncaught errors of the event loop in the same way."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        error = context.get("exception")
        text = str(context.get("message", "an error on the event loop"))
        logging.getLogger("outrider.server").error("%s: %s", text, error if error is not None else "")

    loop.set_exception_handler(handle)
