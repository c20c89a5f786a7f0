"""A time budget for work beside serving: a small share while requests are served, and long pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

_FIRST_S = 0.1
"""Assumed duration of the first operation."""
_FADES = 0.99
"""Decay of the longest operation's duration, at every further one."""
_MOST_DOUBLED = 30


class WorkEnded(Exception):  # noqa: N818
    """The work is given up because the server stops."""


@final
class Pace:
    """Lets work go on, one operation at a time. An operation begins when there is no debt of time, or in a pause that has
    lasted long enough.

        saved   = share * (seconds of serving) - (seconds of work beside serving)               at most 0
        begin     when saved = 0,   or after a pause of  price * 2 ** (owed / price)            owed = -saved

    So work stops in the middle of a pass when requests arrive. It does not start at the beginning of a pause: requests may come
    in waves, and an operation that began between two waves would run beside the second. Time beside requests is owed, and each
    owed price doubles the pause that is waited for. So if no pause is longer than P, work takes at most this much of any
    stretch of serving:

        share * (seconds of serving) + price * (2 + log2(P / price))

    The price is the time of the longest recent operation. Idle time does not reduce the debt. A share of 1 means no limit."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._changed = threading.Condition()
        self._is_idle, self._is_working, self._has_ended, self._told = True, False, False, time.perf_counter()
        self._price = _FIRST_S
        self._paused = self._begun = self.saved = 0.0
        self.seconds = self.served = self.beside = 0.0
        """Seconds of work, of serving, and of work during serving."""

    def tell(self, *, is_idle: bool) -> None:
        """Called by the serving thread between rounds. The argument says whether no request is running."""
        with self._changed:
            self._count()
            self._is_idle = is_idle
            self._paused = self._paused if is_idle else 0.0
            if self._may_work():
                self._changed.notify_all()

    def end(self) -> None:
        """Give up the work before its next operation, because the server stops."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context for PyTorch work that waits for the budget before each operation of the thread."""
        if self._share >= 1:
            began = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - began
            return
        try:
            with _Stepwise(self):
                yield
        finally:
            self._rest()

    def step(self) -> None:
        """Wait for the budget before an operation. Raises ``WorkEnded`` if the server stops."""
        with self._changed:
            self._end_operation()
            self._changed.wait_for(self._may_work)
            if self._has_ended:
                raise WorkEnded
            self._count()
            self._is_working, self._begun = True, self.seconds

    def _rest(self) -> None:
        with self._changed:
            self._end_operation()

    def _end_operation(self) -> None:
        """Account for the previous operation, if there was one."""
        self._count()
        if self._is_working:
            self._is_working, self._price = False, max(self.seconds - self._begun, _FADES * self._price)

    def _may_work(self) -> bool:
        if self._has_ended:
            return True
        if not self._is_idle:
            return self.saved >= 0
        return self._paused >= self._price * 2 ** min(-self.saved / self._price, _MOST_DOUBLED)

    def _count(self) -> None:
        """Add the time since the last call to serving or to the pause, and to work."""
        passed, self._told = time.perf_counter() - self._told, time.perf_counter()
        self.seconds += passed if self._is_working else 0.0
        if self._is_idle:
            self._paused += passed
            return
        self._paused, self.served = 0.0, self.served + passed
        self.saved = min(0.0, self.saved + self._share * passed)
        if self._is_working:
            self.saved, self.beside = self.saved - passed, self.beside + passed


@final
class _Stepwise(TorchDispatchMode):
    """Calls the budget before every operation of a thread, including backward passes."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self._pace.step()
        return func(*args, **(kwargs or {}))
