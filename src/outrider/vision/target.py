"""Lets any decoder read image embeddings among tokens.

The decoder's embedding table gets a few rows more than the vocabulary. Before a piece of a prompt is read, its embeddings are
written to those rows. So the pass itself, on a CPU or a GPU, looks up ids as usual. Logits have the vocabulary's size.

Images with several position axes (Qwen2-VL) are read with a separate rotary table. Rotations act through distances, so the
whole prompt is shifted until the first token after its last image has the position of its slot. Then later passes need no
change.

    slots       0 .. n - 1                      n, n + 1, ...            n: end of the last image
    turned as   p_s + n - P  on every axis      n, n + 1, ...            P: the position that follows the last image
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import final

import torch
from torch import Tensor

from outrider.core.draft import Resume
from outrider.core.interfaces import Cache, Target
from outrider.core.layered_target import LayeredTarget
from outrider.core.placing_target import PlacingTarget
from outrider.core.route import Route
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.core.wrapped_target import WrappedTarget
from outrider.vision.book import FIRST, Book, has_embedded, num_embedded

SPARE_ROWS = 2048
"""Spare rows of the embedding table after the vocabulary: the most embeddings of one pass."""

_Tapped = Mapping[int, list[Tensor]]


@final
class VisionTarget(WrappedTarget[LayeredTarget], LayeredTarget):
    """A decoder whose prompts may hold embeddings. Its book says which."""

    def __init__(self, inner: LayeredTarget, table: Tensor, book: Book) -> None:
        """``table`` is the decoder's embedding, with ``SPARE_ROWS`` rows after the vocabulary."""
        super().__init__(inner)
        self.traits = replace(self.traits, can_be_captured=inner.traits.can_be_captured)
        self.table, self.book = table, book
        self._spare, self._lock = table[inner.vocab_size :], Lock()

    @property
    def captured_as(self) -> Target:
        """The decoder itself: rounds come after the prompt, where there are no images."""
        return self.inner

    def new_cache(self, batch_size: int) -> Cache:
        return self.inner.new_cache(batch_size)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache, *, taps: Sequence[int] = ()) -> _Tapped:
        if not has_embedded(rows):
            return self.inner.prefill(rows, cache, taps=taps)
        rest, pieces = list(rows), []
        for row, tokens in enumerate(rows):
            positions = self.book.positions(tokens)
            if positions is not None:
                size = num_embedded(tokens)
                alone = [tokens[:size] if other == row else [] for other in range(len(rows))]
                pieces += self._read(self._placed(positions[: cache.lengths[row] + size]), alone, cache, taps)
                rest[row] = tokens[size:]
        pieces += self._read(self.inner, rest, cache, taps)
        return {tap: [torch.cat([piece[tap][row] for piece in pieces]) for row in range(len(rows))] for tap in taps}

    def score(
        self, tree: TokenTree, cache: Cache, *, taps: Sequence[int] = (), start: int = 0, resume: Resume | None = None
    ) -> Scores:
        return self.inner.score(tree, cache, taps=taps, start=start, resume=resume)

    def exit(self, tree: TokenTree, cache: Cache, *, route: Route, start: int = 0, begun: Resume | None = None) -> Tensor:
        return self.inner.exit(tree, cache, route=route, start=start, begun=begun)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """[N, H] input of the first layer for tokens of the vocabulary."""
        return self.table[torch.tensor(list(tokens), device=self.device)]

    def _placed(self, positions: Tensor) -> Target:
        assert isinstance(self.inner, PlacingTarget), "a model with several axes of positions was opened as one that places"
        return self.inner.placed(positions)

    def _read(self, model: Target, rows: Sequence[Sequence[int]], cache: Cache, taps: Sequence[int]) -> list[_Tapped]:
        """Append rows, with at most as many tokens at a time as there are spare embedding rows."""
        if not has_embedded(rows):
            return [model.prefill(rows, cache, taps=taps)]
        step = SPARE_ROWS // sum(has_embedded([row]) for row in rows)
        return [
            self._piece(model, [row[begin : begin + step] for row in rows], cache, taps)
            for begin in range(0, max(map(len, rows)), step)
        ]

    def _piece(self, model: Target, rows: Sequence[Sequence[int]], cache: Cache, taps: Sequence[int]) -> _Tapped:
        embedded = [token for row in rows for token in row if token >= FIRST]
        free = iter(range(self.vocab_size, self.vocab_size + len(embedded)))
        named = [[next(free) if token >= FIRST else token for token in row] for row in rows]
        with self._lock:
            if embedded:
                self._spare[: len(embedded)] = torch.stack([self.book.state(token) for token in embedded])
            return model.prefill(named, cache, taps=taps)
