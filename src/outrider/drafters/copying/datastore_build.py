"""Write a datastore: documents are collected into shards, and each shard is sorted on its own.

A look-up asks every shard, so few large shards are faster. Their size is limited by the memory that sorting takes. The file
``datastore.json`` is written last, so an interrupted build leaves no datastore.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.errors import OptionError
from outrider.drafters.copying.datastore import FORMAT, META_FILE, SORT_DEPTH, VERSION, Datastore, checksum
from outrider.drafters.copying.shard_size import SHARD_TOKENS
from outrider.drafters.copying.suffix_array import suffix_array

_MIN_SHARD = 1024


def build_datastore(
    documents: Iterable[Sequence[int]],
    path: str | Path,
    *,
    vocab_size: int,
    shard_tokens: int = SHARD_TOKENS,
    notes: Mapping[str, str] | None = None,
) -> Datastore:
    """Write the datastore of ``documents`` (token ids) into the folder ``path``, and open it."""
    folder = Path(path)
    if shard_tokens < _MIN_SHARD:
        raise OptionError(f"shard_tokens = {shard_tokens} is not valid; use at least {_MIN_SHARD}")
    if (folder / META_FILE).exists():
        raise OptionError(f"{folder} holds a datastore already; delete it first, or build in another folder")
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(folder, vocab_size, shard_tokens)
    for document in documents:
        writer.add(document)
    writer.close(dict(notes or {}))
    return Datastore(folder)


class _Writer:
    """Collects documents, and writes a shard once there are enough."""

    def __init__(self, folder: Path, vocab_size: int, shard_tokens: int) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self.width = 2 if vocab_size < 0xFFFF else 4
        self.border = np.array([(1 << 8 * self.width) - 1], f"u{self.width}")
        self.parts: list[np.ndarray] = []
        self.num_waiting = 0
        self.num_documents = 0
        self.max_token = -1
        self.shards: list[dict[str, Any]] = []

    def add(self, document: Sequence[int]) -> None:
        """Add a document. One longer than a shard is split."""
        ids = np.asarray(document, np.int64)
        if not ids.size:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise OptionError(f"a document holds token {bad} of a vocabulary of {self.vocab_size}; use the model's tokenizer")
        self.max_token = max(self.max_token, high)
        self.num_documents += 1
        room = self.shard_tokens - 1
        for begin in range(0, len(ids), room):
            piece = ids[begin : begin + room].astype(f"u{self.width}")
            if self.num_waiting + len(piece) + 1 > self.shard_tokens:
                self.flush()
            self.parts += [piece, self.border]
            self.num_waiting += len(piece) + 1

    def flush(self) -> None:
        if not self.parts:
            return
        tokens = np.concatenate(self.parts)
        self.parts, self.num_waiting = [], 0
        order = suffix_array(tokens, depth=SORT_DEPTH)
        entry: dict[str, Any] = {"num_tokens": len(tokens), "crc32": {}}
        for part, array in (("tokens", tokens.astype(f">u{self.width}")), ("order", order.astype("<u4"))):
            name, data = f"{len(self.shards):05d}.{part}", array.tobytes()
            (self.folder / name).write_bytes(data)
            entry[part], entry["crc32"][part] = name, checksum(data)
        self.shards.append(entry)

    def close(self, notes: dict[str, str]) -> None:
        self.flush()
        if not self.shards:
            raise OptionError("there is no text to build a datastore from; give files that are not empty")
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "vocab_size": self.vocab_size,
            "max_token": self.max_token,
            "width": self.width,
            "num_tokens": sum(shard["num_tokens"] for shard in self.shards),
            "num_documents": self.num_documents,
            "notes": notes,
            "shards": self.shards,
        }
        (self.folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
