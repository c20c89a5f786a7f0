"""A uniform sample of a stream: every document that ever came is in the sample with the same probability.

Vitter's algorithm R: the n-th document takes the place of a random one of the k kept with chance k / n.
"""

from __future__ import annotations

from typing import final

import numpy as np

from outrider.train.data import Document


@final
class UniformSample:
    """A uniform sample of all documents that were added."""

    def __init__(self, size: int, seed: int) -> None:
        self.kept: list[Document] = []
        self._size, self._num_added = size, 0
        self._random = np.random.default_rng([seed, 1])  # the thread that learns has another one

    def add(self, document: Document) -> None:
        self._num_added += 1
        if len(self.kept) < self._size:
            self.kept.append(document)
        elif (place := int(self._random.integers(self._num_added))) < self._size:
            self.kept[place] = document
