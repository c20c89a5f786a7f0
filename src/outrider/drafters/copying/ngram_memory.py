"""The memory of the n-gram cache: for every n-gram of up to ``max_ngram`` tokens, what followed it and how often.

It is a lasting memory, with a maximum size, ``save`` and ``load``. An n-gram keeps its total count and a few continuations. If
it has no room, a new continuation replaces the rarest (of equals the oldest) and starts at 1, so counts are never too high. The
size is limited in n-grams, and the least recently used are dropped first. For this there are a young and an old generation;
using an n-gram moves it to the young one. When the young one holds half the limit, the old one is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import final

import numpy as np

from outrider.core.errors import ModelError, OptionError
from outrider.drafters.copying.memory_file import read_memory, write_memory
from outrider.drafters.copying.saved_memory import SavedMemory, memory_of

_KIND = "n-gram memory 1"
_SHIFT = 32
"""Bits of a token inside an n-gram's key."""
MAX_FOLLOWERS = 8
"""Most continuations an n-gram keeps."""
DEFAULT_ENTRIES = 500_000
"""About 170 MB."""
_TOTAL = -1
"""Key of an n-gram's total among its counts."""


@final
class NgramMemory(SavedMemory):
    """Counts of what followed n-grams, for n from 1 to ``max_ngram``."""

    def __init__(self, *, vocab_size: int, max_ngram: int = 4, max_entries: int = DEFAULT_ENTRIES) -> None:
        if not isinstance(max_ngram, int) or not 1 <= max_ngram <= 16:
            raise OptionError(f"max_ngram = {max_ngram!r} is not valid; use a whole number from 1 to 16")
        if max_entries < 2:
            raise OptionError(f"max_entries = {max_entries} is not valid; use at least 2")
        super().__init__(vocab_size)
        self.max_ngram = max_ngram
        self.max_entries = max_entries
        self._young: dict[int, dict[int, int]] = {}
        self._old: dict[int, dict[int, int]] = {}

    @property
    def num_entries(self) -> int:
        """Number of n-grams remembered, at most ``max_entries``."""
        return len(self._young) + len(self._old)

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self._young, self._old = {}, {}

    def learn(self, history: Sequence[int], begin: int) -> None:
        """Count the tokens of ``history`` from ``begin`` on, each after the n-grams that end before it."""
        size = self.max_ngram
        with self.lock:
            for end in range(max(begin, 1), len(history)):
                token, key, keys = history[end], 1, []
                for before in reversed(history[max(0, end - size) : end]):
                    key = key << _SHIFT | before
                    keys.append(key)
                for key in reversed(keys):  # the longest first, so that it is never used later, nor kept longer, than its ends
                    self._count(key, token)

    def followers(self, context: Sequence[int], *, min_count: int = 1) -> tuple[dict[int, int], int]:
        """Counts of the tokens that followed the longest suffix of ``context`` seen at least ``min_count`` times, and
        their total.

        Empty and 0 if nothing is known. The newest token is last.
        """
        key, found = 1, {_TOTAL: 0}
        for before in context[: -self.max_ngram - 1 : -1]:
            key = key << _SHIFT | before
            known = self._young.get(key) or self._old.get(key)
            if known is None or known[_TOTAL] < min_count:
                break  # longer n-grams were learned with this one, so they are not known or rarer still
            found = known
        counts = dict(found)
        return counts, counts.pop(_TOTAL)

    def save(self, path: str | Path) -> None:
        """Write the table, least recently used first. It holds the n-grams (newest token first, padded with -1) and one
        row with the counts of all of them, ``sizes`` each. An n-gram's total (token -1) precedes its continuations."""
        with self.lock:
            items = [(key, dict(found)) for table in (self._old, self._young) for key, found in table.items()]
        grams = np.full((len(items), self.max_ngram), -1, np.int32)
        for row, (key, _) in enumerate(items):
            gram = _tokens_of(key)
            grams[row, : len(gram)] = gram
        arrays = {
            "grams": grams,
            "sizes": np.array([len(found) for _, found in items], np.int32),
            "tokens": np.array([token for _, found in items for token in found], np.int32),
            "counts": np.array([count for _, found in items for count in found.values()], np.int32),
        }
        write_memory(path, _KIND, header={"vocab_size": self.vocab_size}, arrays=arrays)

    @staticmethod
    def load(path: str | Path, *, vocab_size: int, max_ngram: int = 4, max_entries: int = DEFAULT_ENTRIES) -> NgramMemory:
        """Read a saved table, without n-grams longer than ``max_ngram`` and without the oldest beyond ``max_entries``."""
        _, arrays = read_memory(path, _KIND, vocab_size=vocab_size)
        memory = NgramMemory(vocab_size=vocab_size, max_ngram=max_ngram, max_entries=max_entries)
        grams, tokens = arrays["grams"], arrays["tokens"]
        if max(grams.max(initial=-1), tokens.max(initial=-1)) >= vocab_size or arrays["sizes"].sum() != len(tokens):
            raise ModelError(f"memory file {path} holds impossible counts; delete it and save it again")
        counted = zip(tokens.tolist(), arrays["counts"].tolist(), strict=True)
        for gram, size in zip(grams.tolist(), arrays["sizes"].tolist(), strict=True):
            known, found = [token for token in gram if token >= 0], dict(islice(counted, size))
            if len(known) <= max_ngram:
                memory._put(_key_of(known), found)
        return memory

    @staticmethod
    def of(given: NgramMemory | str | None, *, vocab_size: int, max_ngram: int, max_entries: int) -> NgramMemory:
        """A memory from a user's option: an existing one, the file of a saved one, or nothing."""
        sizes = {"vocab_size": vocab_size, "max_ngram": max_ngram, "max_entries": max_entries}
        new, load = partial(NgramMemory, **sizes), partial(NgramMemory.load, **sizes)
        return memory_of(given, vocab_size=vocab_size, new=new, load=load)

    def _count(self, key: int, token: int) -> None:
        found = self._young.get(key)
        if found is None:
            found = self._old.pop(key, None)
            found = {_TOTAL: 0} if found is None else found
            self._put(key, found)
        found[_TOTAL] += 1
        times = found.pop(token, 0)  # taken out and put back: the newest stands last, which settles ties
        if not times and len(found) > MAX_FOLLOWERS:
            del found[min(found, key=found.__getitem__)]
        found[token] = times + 1

    def _put(self, key: int, found: dict[int, int]) -> None:
        """Add to the young generation. When that is full, it becomes the old one."""
        if len(self._young) >= self.max_entries // 2:
            self._old, self._young = self._young, {}
        self._young[key] = found


def _key_of(newest_first: Sequence[int]) -> int:
    """The key of an n-gram. A leading 1 keeps n-grams of different lengths apart."""
    key = 1
    for token in newest_first:
        key = key << _SHIFT | token
    return key


def _tokens_of(key: int) -> list[int]:
    tokens: list[int] = []
    while key > 1:
        tokens.append(key & ((1 << _SHIFT) - 1))
        key >>= _SHIFT
    return tokens[::-1]
