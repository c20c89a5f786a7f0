"""Explains waits: after two seconds a line says what takes so long, and at the end how long it took.

Successive waits count together: of two waits of 1.9 seconds each, the second is explained. In a terminal the line counts the
seconds; elsewhere it is written once, and again now and then. ``OUTRIDER_QUIET=1`` turns all of it off.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO, TypeVar, cast

_Item = TypeVar("_Item")

PATIENCE = 2.0
"""Waits of up to this many seconds are not explained."""
_AGAIN = 30.0
"""Seconds between two lines outside a terminal."""
_NEXT = 0.5
"""A wait that begins within this many seconds of another one continues its silence."""


@dataclass
class _Silence:
    """How long nothing was printed."""

    since: float
    until: float

    def before(self, now: float) -> float:
        """Seconds of silence before a wait that begins now."""
        return now - self.since if now - self.until < _NEXT else 0.0


_silence = _Silence(time.perf_counter(), time.perf_counter())


@contextmanager
def waiting(what: str, *, patience: float | None = None, out: TextIO | None = None) -> Iterator[None]:
    """``with waiting("loading model"): ...`` explains a long wait on standard error."""
    if os.environ.get("OUTRIDER_QUIET", "0") not in ("", "0"):
        yield
        return
    stream, began, ended = out or sys.stderr, time.perf_counter(), threading.Event()
    shown = threading.Event()
    silent = _silence.before(began)
    arguments = (what, stream, max(0.0, (PATIENCE if patience is None else patience) - silent), ended, shown)
    teller = threading.Thread(target=_tell, args=arguments, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        now = time.perf_counter()
        _silence.since, _silence.until = now if shown.is_set() else began - silent, now
        if shown.is_set():
            line_start = "\r\x1b[K" if stream.isatty() else ""  # the line that counts is longer than its end
            print(f"{line_start}{what}: {now - began:.0f} s", file=stream, flush=True)


def first_explained(items: Iterable[_Item], what: str) -> Iterator[_Item]:
    """Yields the items, and explains the wait for the first one."""
    pending, none = iter(items), object()
    with waiting(what):
        first = next(pending, none)
    if first is not none:
        yield cast("_Item", first)
        yield from pending


def _tell(what: str, stream: TextIO, patience: float, ended: threading.Event, shown: threading.Event) -> None:
    began, is_terminal = time.perf_counter(), stream.isatty()
    while not ended.wait(patience if not shown.is_set() else 1.0 if is_terminal else _AGAIN):
        shown.set()
        if is_terminal:
            print(f"\r{what} ... {time.perf_counter() - began:.0f} s", end="", file=stream, flush=True)
        else:
            print(f"{what} ...", file=stream, flush=True)
