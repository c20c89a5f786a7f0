"""The target's states of a corpus, computed once and kept on disk: for many epochs, or many runs, over the same texts.

The store keeps hidden states of the tapped layers and of the last one. Logits would be V / H times larger, so they are computed
from the last state, a few positions at a time, as without a store. A document is identified by its tokens, so another run with
the same target and layers can use the store. The index is written after the states it points to, so a killed run loses at most
the last document.

    states.bin: [len, taps, H] of every document, one after the other;      index.jsonl: {"digest", "offset", "length"} per line
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Target
from outrider.models.heads.folder import signature_of
from outrider.train.data import Document, digest_of
from outrider.train.features import compute


@final
class FeatureStore:
    """States by document, in a folder."""

    def __init__(self, folder: Path, target: Target, taps: Sequence[int]) -> None:
        if max(taps, default=0) > target.num_layers:
            raise OptionError("these heads read the target's cache, which is not kept on disk; train them without store")
        self._folder, self._target, self._taps = folder, target, sorted({*taps, target.num_layers})
        probe = compute(target, [Document((0,))], taps)[target.num_layers][0]
        self._width, self._dtype = probe.shape[1], probe.dtype
        self._entry = len(self._taps) * self._width * probe.element_size()
        """Bytes of one position."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._check_header()
            self._places = self._read_index()
            self._end = max((offset + length for offset, length in self._places.values()), default=0) * self._entry
            self._file = (folder / "states.bin").open("ab")
            self._file.truncate(self._end)
            self._index = (folder / "index.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise ModelError(f"states cannot be kept in {folder} ({error}); name another folder in store") from error

    def states(self, documents: Sequence[Document]) -> dict[int, list[Tensor]]:
        """Compute like ``compute`` in ``features.py``. Unknown states are computed and stored."""
        digests = [digest_of(document).hex() for document in documents]
        new = {digest: document for digest, document in zip(digests, documents, strict=True) if digest not in self._places}
        if new:
            self._keep(new)
        kept = np.memmap(self._folder / "states.bin", dtype=np.uint8, mode="r")
        rows = [self._read(kept, *self._places[digest]) for digest in digests]
        return {tap: [row[:, index] for row in rows] for index, tap in enumerate(self._taps)}

    def flush(self) -> None:
        """Nothing to do: states are stored as they come."""

    def _keep(self, new: dict[str, Document]) -> None:
        found = compute(self._target, list(new.values()), self._taps)
        try:
            for number, (digest, document) in enumerate(new.items()):
                states = torch.stack([found[tap][number] for tap in self._taps], 1).cpu().contiguous()
                self._file.write(states.view(torch.uint8).numpy().tobytes())
                self._file.flush()
                offset, length = self._end // self._entry, len(document.tokens)
                self._index.write(json.dumps({"digest": digest, "offset": offset, "length": length}) + "\n")
                self._index.flush()
                self._places[digest], self._end = (offset, length), self._end + length * self._entry
        except OSError as error:
            raise ModelError(f"states cannot be kept in {self._folder} ({error}); make room, or train without store") from error

    def _read(self, kept: Any, offset: int, length: int) -> Tensor:
        """[len, taps, H]"""
        piece = np.array(kept[offset * self._entry : (offset + length) * self._entry])
        states = torch.from_numpy(piece).view(self._dtype).view(length, len(self._taps), self._width)
        return states.to(self._target.device)

    def _check_header(self) -> None:
        """Refuse states of another target, other layers or another precision."""
        signature = signature_of(self._target, self._width)
        header = {"taps": self._taps, "width": self._width, "dtype": str(self._dtype), "signature": list(signature)}
        path = self._folder / "header.json"
        if not path.is_file():
            path.write_text(json.dumps(header))
        elif json.loads(path.read_text()) != header:
            raise OptionError(f"{self._folder} holds states of another target or of other layers; name another folder in store")

    def _read_index(self) -> dict[str, tuple[int, int]]:
        path = self._folder / "index.jsonl"
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.is_file() else []
        path.write_text("".join(whole))
        entries = [json.loads(line) for line in whole]
        return {entry["digest"]: (entry["offset"], entry["length"]) for entry in entries}
