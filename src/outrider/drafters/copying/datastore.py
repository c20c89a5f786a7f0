"""A datastore: a token corpus on disk with a suffix array, so that any context is found in microseconds by binary search.

A folder holds ``datastore.json`` and, per shard, two plain arrays. The first holds the tokens as big-endian integers, so that
comparing bytes compares tokens. The second holds the positions (uint32, little-endian) in the order of the text that starts
there. Both are memory-mapped: opening takes milliseconds whatever the size, and processes share the memory. Documents end with
a border that is not a token, so no match and no continuation crosses from one document into the next.

It is the datastore of REST: He et al. 2023, arXiv 2311.08252. ``build_datastore`` writes one.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, final

import numpy as np

from outrider.core.errors import ModelError

MAX_MATCH = 16
MAX_CONTINUATION = 16
SORT_DEPTH = MAX_MATCH + MAX_CONTINUATION
"""Positions are sorted by this many tokens, so the continuations of a match are sorted too."""
META_FILE, FORMAT, VERSION = "datastore.json", "outrider datastore", 1


@dataclass(frozen=True, eq=False)
class Hits:
    """The places where a context was found."""

    match_len: int
    num_hits: int
    """Number of occurrences in all shards."""
    continuations: np.ndarray
    """[H, D] following tokens in ascending order, -1 after a document's end. H is ``num_hits`` or the given limit."""


@final
class _Shard:
    """One part of the corpus, mapped into memory."""

    def __init__(self, folder: Path, entry: Mapping[str, Any], width: int) -> None:
        self.num_tokens = int(entry["num_tokens"])
        self.width = width
        self.border = (1 << 8 * width) - 1
        self.text = _mapped(folder / entry["tokens"], self.num_tokens * width)
        self.tokens = np.frombuffer(self.text, f">u{width}")
        order = _mapped(folder / entry["order"], self.num_tokens * 4)
        self.order = np.frombuffer(order, "<u4")
        self._order_view = memoryview(order).cast("I")  # yields Python numbers, which are quicker to slice with than numpy's

    def find(self, pattern: bytes) -> tuple[int, int]:
        """The range of the suffix array whose texts start with ``pattern``."""
        low = self._lower(pattern)
        if not self._starts(low, pattern):
            return low, low
        return low, bisect_right(self._order_view, pattern, lo=low, key=self._reader(len(pattern)))

    def longest(self, pattern: bytes, min_len: int) -> int:
        """Length of the longest suffix of ``pattern`` that occurs, if at least ``min_len``; otherwise 0."""
        size = len(pattern) // self.width
        if size < min_len or not self._occurs(pattern, min_len):
            return 0
        # An end that occurs implies that all shorter ends do: bisect on the length.
        return bisect_left(range(size + 1), True, lo=min_len + 1, key=lambda n: not self._occurs(pattern, n)) - 1

    def follow(self, places: np.ndarray, length: int) -> np.ndarray:
        """[H, length] tokens starting at each place; -1 after the end of the document or the shard."""
        columns = places[:, None] + np.arange(length)
        rows = self.tokens[np.minimum(columns, self.num_tokens - 1)].astype(np.int64)
        ended = np.logical_or.accumulate((rows == self.border) | (columns >= self.num_tokens), axis=1)
        rows[ended] = -1
        return rows

    def _occurs(self, pattern: bytes, size: int) -> bool:
        end = pattern[len(pattern) - size * self.width :]
        return self._starts(self._lower(end), end)

    def _lower(self, pattern: bytes) -> int:
        return bisect_left(self._order_view, pattern, key=self._reader(len(pattern)))

    def _starts(self, index: int, pattern: bytes) -> bool:
        if index >= self.num_tokens:
            return False
        begin = self._order_view[index] * self.width
        return self.text[begin : begin + len(pattern)] == pattern

    def _reader(self, size: int) -> Callable[[int], bytes]:
        text, width = self.text, self.width
        return lambda place: text[place * width : place * width + size]


@final
class Datastore:
    """A corpus that can be searched. Read-only once built: safe to share between threads and processes."""

    def __init__(self, path: str | Path) -> None:
        """Open the datastore in folder ``path``."""
        self.path = Path(path)
        meta = _read_meta(self.path)
        self.vocab_size = int(meta["vocab_size"])
        self.max_token = int(meta["max_token"])
        self.num_tokens = int(meta["num_tokens"])
        self.num_documents = int(meta["num_documents"])
        self.notes: dict[str, str] = meta["notes"]
        """The builder's notes on the corpus, such as the model whose tokenizer it used."""
        self._entries: list[dict[str, Any]] = meta["shards"]
        self._width = int(meta["width"])
        self._shards = [_Shard(self.path, entry, self._width) for entry in self._entries]

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return self.num_tokens * (self._width + 4)

    def search(self, context: Sequence[int], *, min_match: int, max_match: int, length: int, max_hits: int) -> Hits | None:
        """Continuations, up to ``length`` tokens, of the longest suffix of ``context`` that occurs; None if none does.

        Of more than ``max_hits`` hits in a shard, evenly spaced ones are taken. They are sorted by continuation, so the
        first ones alone would be alike.
        """
        assert 1 <= min_match <= max_match <= MAX_MATCH and 1 <= length <= MAX_CONTINUATION and max_hits >= 1
        pattern = np.asarray(self._known_end(context[-max_match:]), f">u{self._width}").tobytes()
        lengths = [shard.longest(pattern, min_match) for shard in self._shards]
        match_len = max(lengths, default=0)
        if match_len == 0:
            return None
        end = pattern[len(pattern) - match_len * self._width :]
        found = [(shard, *shard.find(end)) for shard, size in zip(self._shards, lengths, strict=True) if size == match_len]
        rows = [_spread(shard, low, high, max_hits) + match_len for shard, low, high in found]
        texts = [shard.follow(places, length) for (shard, _, _), places in zip(found, rows, strict=True)]
        num_hits = sum(high - low for _, low, high in found)
        return Hits(match_len, num_hits, texts[0] if len(texts) == 1 else _merged(texts))

    def verify(self) -> None:
        """Read everything and compare it with the checksums taken when it was built."""
        for entry in self._entries:
            for part in ("tokens", "order"):
                if checksum((self.path / entry[part]).read_bytes()) != entry["crc32"][part]:
                    raise ModelError(f"{self.path / entry[part]} is damaged: its checksum does not match; build it again")

    def _known_end(self, recent: Sequence[int]) -> Sequence[int]:
        """The part of a context after the last token that the corpus cannot contain."""
        begin = max((i + 1 for i, token in enumerate(recent) if token > self.max_token), default=0)
        return recent[begin:]


def _spread(shard: _Shard, low: int, high: int, limit: int) -> np.ndarray:
    """Positions of at most ``limit`` evenly spaced entries in a range of the suffix array."""
    number = high - low
    chosen = slice(low, high) if number <= limit else low + np.arange(limit) * number // limit
    return shard.order[chosen].astype(np.int64)


def _merged(texts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of several shards in ascending order; documents' ends (-1) come last, as in each shard."""
    rows = np.concatenate(texts)
    keys = np.where(rows < 0, np.iinfo(np.int64).max, rows)
    return rows[np.lexsort(keys.T[::-1])]


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META_FILE
    if not file.is_file():
        raise ModelError(f"{folder} is not a datastore: it has no {META_FILE}; build one with `outrider datastore build`")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {str(error).splitlines()[0]}; build the datastore again") from None
    needed = {"vocab_size", "max_token", "width", "num_tokens", "num_documents", "notes", "shards"}
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("version") != VERSION or needed - set(meta):
        raise ModelError(f"{file} is not of version {VERSION} of the datastore format; build the datastore again")
    return meta


def _mapped(file: Path, num_bytes: int) -> mmap:
    if not file.is_file() or file.stat().st_size != num_bytes:
        raise ModelError(f"{file} is missing or does not have {num_bytes} bytes; build the datastore again")
    with file.open("rb") as handle:
        return mmap(handle.fileno(), 0, access=ACCESS_READ)


def checksum(data: bytes) -> int:
    return zlib.crc32(data)
