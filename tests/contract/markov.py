"""A model whose next token depends on the last one alone: small enough to know its law, and a Target like any other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.interfaces import Cache, Target
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree


class LengthsOnly(Cache):
    """Remembers nothing but how much there is."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def reserve(self, num_nodes: int, *, start: int = 0) -> None:
        pass

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def fork(self, rows: Sequence[int]) -> LengthsOnly:
        return LengthsOnly([self.lengths[row] for row in rows])

    def join(self, other: Cache) -> LengthsOnly:
        return LengthsOnly([*self.lengths, *other.lengths])


class Markov(Target):
    """Logits [V, V] by last token. Counts the nodes it is asked about."""

    def __init__(self, logits: Tensor) -> None:
        self.table = logits
        self.vocab_size, self.max_len, self.num_layers = len(logits), 1000, 0
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_scored: list[int] = []

    def new_cache(self, batch_size: int) -> LengthsOnly:
        return LengthsOnly([0] * batch_size)

    def prefill(self, rows, cache, *, taps=()):
        cache.lengths = [length + len(row) for length, row in zip(cache.lengths, rows, strict=True)]
        return {}

    def score(self, tree: TokenTree, cache: Cache, *, taps=(), start: int = 0, resume=None) -> Scores:
        assert resume is None
        self.num_scored.append(tree.num_nodes - start)
        return Scores(self.table[tree.tokens[:, start:]])

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError
