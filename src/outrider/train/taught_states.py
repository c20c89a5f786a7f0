"""The target's states of texts that are learned from several times: each text is read once, in batches with others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import final

from torch import Tensor

from outrider.core.interfaces import Target
from outrider.models.heads import PackedTexts
from outrider.train.data import Document
from outrider.train.features import DocumentRows, compute


@final
class TaughtStates:
    """States by text; the least recently used are dropped first. Not thread-safe."""

    def __init__(self, target: Target, taps: Sequence[int], max_bytes: int) -> None:
        """``taps`` are the target layers read beside the last one. At most ``max_bytes`` are kept."""
        self._target, self._taps, self._max_bytes = target, tuple(taps), max_bytes
        self._known: OrderedDict[Document, dict[int, Tensor]] = OrderedDict()
        self.num_bytes = 0

    def packed(self, documents: Sequence[Document]) -> PackedTexts:
        """The texts packed into rows with their states. The target first reads unknown texts, all at once."""
        found = self._read([document for document in dict.fromkeys(documents) if document not in self._known])
        for document in documents:
            if document in self._known:
                self._known.move_to_end(document)
                found[document] = self._known[document]
        states = {tap: [found[document][tap] for document in documents] for tap in found[documents[0]]}
        self._forget()
        return DocumentRows(states, documents, row_len=1, last=self._target.num_layers).packed(self._taps)

    def _read(self, documents: Sequence[Document]) -> dict[Document, dict[int, Tensor]]:
        """Compute and keep the states of new texts."""
        if not documents:
            return {}
        states = compute(self._target, documents, self._taps)
        found = {document: {tap: states[tap][row].clone() for tap in states} for row, document in enumerate(documents)}
        self._known |= found
        self.num_bytes += sum(map(_size, found.values()))
        return found

    def _forget(self) -> None:
        while self.num_bytes > self._max_bytes and self._known:
            _, states = self._known.popitem(last=False)
            self.num_bytes -= _size(states)


def _size(states: dict[int, Tensor]) -> int:
    return sum(state.numel() * state.element_size() for state in states.values())
