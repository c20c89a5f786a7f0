"""Embeddings under token ids of their own, so that a prompt with images is a list of integers like any other.

The ids begin far beyond every vocabulary. They are given out by content: the same image gets the same ids again, another image
never does. Prefix caches, preemption and batches compare and cut lists of ids, so they need not know what an image is, and two
images with the same placeholders cannot be confused.

    id = FIRST + run * SPAN + place            run: one image, or one prompt up to its last image; place: within the run
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import final
from weakref import WeakValueDictionary

from torch import Tensor

FIRST = 1 << 40
"""The first id that names an embedding."""
SPAN = 1 << 20
"""Number of ids that are reserved for one run of embeddings."""
_KEPT = 16
"""Number of runs that are kept after their last request has ended, for later requests."""
_KNOWN = 1 << 16
"""Number of contents whose ids are remembered."""


@final
@dataclass(frozen=True, eq=False)
class EmbeddingRun:
    """Embeddings of consecutive positions of a prompt."""

    number: int
    states: Tensor
    """[N, H] input of the first layer."""
    positions: Tensor | None = None
    """[N, D / 2] rotary position of every pair of dimensions, for models with several position axes. Such a run begins a
    prompt."""

    @property
    def ids(self) -> list[int]:
        begin = FIRST + self.number * SPAN
        return list(range(begin, begin + len(self.states)))


@final
class Book:
    """Runs of embeddings by their ids. Each is kept while a request holds it, and a few runs are kept longer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0
        self._runs: WeakValueDictionary[int, EmbeddingRun] = WeakValueDictionary()
        self._recent: OrderedDict[int, EmbeddingRun] = OrderedDict()

    def run(self, key: bytes, make: Callable[[], tuple[Tensor, Tensor | None]]) -> EmbeddingRun:
        """The run with this content. ``make`` computes its states and positions if they are no longer kept."""
        with self._lock:
            found = self._runs.get(self._number(key))
            if found is not None:
                return self._keep(found)
        states, positions = make()
        assert len(states) < SPAN, "a run has fewer places than ids"
        with self._lock:
            return self._keep(EmbeddingRun(self._number(key), states, positions))

    def state(self, token: int) -> Tensor:
        """[H] the embedding that an id names."""
        run = self._of(token)
        return run.states[(token - FIRST) % SPAN]

    def positions(self, row: Sequence[int]) -> Tensor | None:
        """Positions of the run that continues a row, if the model has several axes."""
        return self._of(row[0]).positions if row and row[0] >= FIRST else None

    def _of(self, token: int) -> EmbeddingRun:
        run = self._runs.get((token - FIRST) // SPAN)
        assert run is not None, "a request holds its embeddings"
        return run

    def _number(self, key: bytes) -> int:
        """The id of a content. Ids of forgotten contents are never used again."""
        if key not in self._numbers:
            self._numbers[key], self._next = self._next, self._next + 1
        self._numbers.move_to_end(key)
        while len(self._numbers) > _KNOWN:
            self._numbers.popitem(last=False)
        return self._numbers[key]

    def _keep(self, run: EmbeddingRun) -> EmbeddingRun:
        self._runs[run.number] = self._recent[run.number] = run
        self._recent.move_to_end(run.number)
        while len(self._recent) > _KEPT:
            self._recent.popitem(last=False)
        return run


def num_embedded(row: Sequence[int]) -> int:
    """Number of tokens at the beginning of a row that are embeddings."""
    return next((place for place, token in enumerate(row) if token < FIRST), len(row))


def has_embedded(rows: Sequence[Sequence[int]]) -> bool:
    return any(row and max(row) >= FIRST for row in rows)
