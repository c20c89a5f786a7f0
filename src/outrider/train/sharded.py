"""The target's states of a corpus in shards, on anything that fsspec can reach: a folder, S3, an HTTP cache, memory.

Object stores cannot append, and processes of one run must not write to one file. So every process fills shards of its own, a
safetensors file each, and an index beside each that names the documents in it. The index is written after its shard, so a
killed run loses only the documents that were not in a shard yet. A reader takes the union of all indexes, so a run on one
process can read what a run on two wrote.

    states-RANK-NUMBER.safetensors: {digest: [len, taps, H]};      states-RANK-NUMBER.json: [digest, ...]
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, final

import fsspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.models.heads.folder import signature_of
from outrider.train.data import Document, digest_of
from outrider.train.features import compute

SHARD_BYTES = 64 << 20
"""Bytes of states collected before a shard is written."""
_OPEN_SHARDS = 8
"""Most shards kept in memory for reading."""


@final
class ShardedStore:
    """States by document, in shards below a path or URL."""

    def __init__(
        self, where: str, target: Target, taps: Sequence[int], *, rank: int = 0, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._where, self._target, self._taps = where.rstrip("/"), target, sorted({*taps, target.num_layers})
        self._rank, self._shard_bytes = rank, shard_bytes
        self._collected: dict[str, Tensor] = {}
        self._read: OrderedDict[str, Mapping[str, Tensor]] = OrderedDict()
        try:
            self._files, self._root = fsspec.core.url_to_fs(self._where)
            self._files.makedirs(self._root, exist_ok=True)
            self._check_header()
            self._places = self._index()
        except (OSError, ImportError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise ModelError(f"states cannot be kept in {where} ({error}); name another place in store") from error

    def states(self, documents: Sequence[Document]) -> dict[int, list[Tensor]]:
        """Compute like ``compute`` in ``features.py``. Unknown states are computed and collected for the next shard."""
        digests = [digest_of(document).hex() for document in documents]
        known = {*self._places, *self._collected}
        new = {digest: document for digest, document in zip(digests, documents, strict=True) if digest not in known}
        if new:
            self._collect(new)
        rows = [self._state(digest).to(self._target.device) for digest in digests]
        if sum(tensor.nbytes for tensor in self._collected.values()) >= self._shard_bytes:
            self.flush()
        return {tap: [row[:, index] for row in rows] for index, tap in enumerate(self._taps)}

    def flush(self) -> None:
        """Write the collected states as a shard."""
        if not self._collected:
            return
        mine = [name for name in set(self._places.values()) if name.startswith(f"states-{self._rank}-")]
        name = f"states-{self._rank}-{1 + max((int(one.rsplit('-', 1)[1]) for one in mine), default=0):05d}"
        try:
            self._files.pipe_file(f"{self._root}/{name}.safetensors", save(self._collected))
            self._files.pipe_file(f"{self._root}/{name}.json", json.dumps(list(self._collected)).encode())
        except OSError as error:
            raise ModelError(
                f"{name} cannot be written to {self._where} ({error}); make room, or train without store"
            ) from error
        self._places |= dict.fromkeys(self._collected, name)
        self._collected = {}

    def _collect(self, new: Mapping[str, Document]) -> None:
        found = compute(self._target, list(new.values()), self._taps)
        for number, digest in enumerate(new):
            self._collected[digest] = torch.stack([found[tap][number] for tap in self._taps], 1).cpu().contiguous()

    def _state(self, digest: str) -> Tensor:
        """[len, taps, H]"""
        if digest in self._collected:
            return self._collected[digest]
        return self._shard(self._places[digest])[digest]

    def _shard(self, name: str) -> Mapping[str, Tensor]:
        if name not in self._read:
            self._read[name] = load(self._files.cat_file(f"{self._root}/{name}.safetensors"))
            if len(self._read) > _OPEN_SHARDS:
                self._read.popitem(last=False)
        self._read.move_to_end(name)
        return self._read[name]

    def _check_header(self) -> None:
        """Refuse states of another target, other layers or another precision."""
        probe = compute(self._target, [Document((0,))], self._taps)[self._target.num_layers][0]
        signature = list(signature_of(self._target, probe.shape[1]))
        mine: dict[str, Any] = {"taps": self._taps, "width": probe.shape[1], "dtype": str(probe.dtype), "signature": signature}
        path = f"{self._root}/header.json"
        if not self._files.exists(path):
            self._files.pipe_file(path, json.dumps(mine).encode())
        elif json.loads(self._files.cat_file(path)) != mine:
            raise OptionError(f"{self._where} holds states of another target or of other layers; name another place in store")

    def _index(self) -> dict[str, str]:
        """The shard of each document."""
        found: dict[str, str] = {}
        for path in sorted(self._files.glob(f"{self._root}/states-*.json")):
            name = str(path).rsplit("/", 1)[-1].removesuffix(".json")
            found |= dict.fromkeys(json.loads(self._files.cat_file(path)), name)
        return found
