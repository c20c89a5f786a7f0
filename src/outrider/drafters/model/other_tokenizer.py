"""The base of drafters whose draft model has its own tokenizer and reads the target's text in its own tokens.

Every round the end of the committed text is translated again. Usually that adds a few tokens to the draft's cache. If the
draft's tokenizer now splits the last word differently, or guesses were rejected, the cache is truncated to the part that is
still right. So the cache always belongs to the committed text, and a rejection needs no other work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.interfaces import Cache, Context, Drafter, Observation, Plan, RowState, Target
from outrider.core.translation import DraftReading, Translation
from outrider.core.tree import TokenTree

_READINGS = 8
"""Readings of a text that are kept, one for each time that it was drafted after."""


@dataclass
class OtherTokenizerState(RowState):
    """The draft model's cache, and the draft's tokens in it."""

    cache: Cache
    read: list[list[int]]
    """Draft tokens that each row has read, guesses included."""
    known: list[list[DraftReading]]
    """Readings of each row's text, the longest last, and as many earlier ones as a rewind may need."""

    def fork(self, rows: Sequence[int]) -> OtherTokenizerState:
        return OtherTokenizerState(
            self.cache.fork(rows), [list(self.read[row]) for row in rows], [list(self.known[row]) for row in rows]
        )

    def join(self, other: OtherTokenizerState) -> OtherTokenizerState:
        return OtherTokenizerState(self.cache.join(other.cache), [*self.read, *other.read], [*self.known, *other.known])


class OtherTokenizerDrafter(Drafter, ABC):
    """Chains from a draft model that has another tokenizer."""

    shape: ClassVar = Shape.CHAIN
    waits: ClassVar = ""
    drafts_alone = True

    def __init__(self, model: Target, translation: Translation, *, vocab_size: int, draws: Draws) -> None:
        self.model, self.translation = model, translation
        self.vocab_size, self.draws = vocab_size, draws

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> OtherTokenizerState:
        del taps
        return OtherTokenizerState(self.model.new_cache(len(rows)), [[] for _ in rows], [[] for _ in rows])

    def propose(self, state: OtherTokenizerState, context: Context, plan: Plan) -> Draft:
        planned = list(map(min, plan.max_depth, plan.max_nodes))
        texts = [self._read(state, row, context.tokens[row]) if depth else None for row, depth in enumerate(planned)]
        depths = [self._room(text, depth) for text, depth in zip(texts, planned, strict=True)]
        if not any(depths):
            return context.without_guesses(self.draws)
        logits = self._catch_up(state, [text if depth else None for text, depth in zip(texts, depths, strict=True)])
        return self._guess(state, context, logits, depths)

    def observe(self, state: OtherTokenizerState, observation: Observation) -> None:
        """Nothing to do: the next round compares the read tokens with the text."""

    def rewind(self, state: OtherTokenizerState, lengths: Sequence[int]) -> None:
        """Drop readings of more than is left. The next round compares the read tokens with the text."""
        pairs = zip(state.known, lengths, strict=True)
        state.known = [[one for one in known if one.num_tokens <= length] for known, length in pairs]

    @abstractmethod
    def _guess(self, state: OtherTokenizerState, context: Context, logits: Tensor, depths: Sequence[int]) -> Draft:
        """Chains of at most ``depths[b]`` guesses, from the draft's logits [B, 1, V] after the text."""

    def _read(self, state: OtherTokenizerState, row: int, tokens: Sequence[int]) -> list[int] | None:
        known = state.known[row]
        found = self.translation.to_draft(tokens, known[-1] if known else None)
        if found is not None:
            state.known[row] = [*(one for one in known if one.num_tokens < found.num_tokens), found][-_READINGS:]
        return None if found is None else found.ids

    def _room(self, text: Sequence[int] | None, depth: int) -> int:
        """Number of guesses that fit into the draft's context; 0 if the text cannot be read yet."""
        return 0 if not text else max(0, min(depth, self.model.max_len - len(text)))

    def _catch_up(self, state: OtherTokenizerState, texts: Sequence[list[int] | None]) -> Tensor:
        """[B, 1, V] logits after every text. A row that drafts nothing keeps its cache."""
        kept = [
            len(read) if text is None else min(_common(read, text), len(text) - 1)
            for read, text in zip(state.read, texts, strict=True)
        ]
        state.cache.truncate(kept)
        kept = list(state.cache.lengths)  # a recurrent draft may have to read a row again
        missing = [[] if text is None else text[done:] for text, done in zip(texts, kept, strict=True)]
        state.read = [read[:done] + new for read, done, new in zip(state.read, kept, missing, strict=True)]
        if any(len(row) > 1 for row in missing):
            self.model.prefill([row[:-1] for row in missing], state.cache)
        return self._feed(state, [row[-1:] for row in missing])

    def _advance(self, state: OtherTokenizerState, tokens: Sequence[int | None]) -> Tensor:
        """[B, 1, V] logits after one more draft token per row; None leaves a row unchanged."""
        rows = [[] if token is None else [token] for token in tokens]
        state.read = [read + row for read, row in zip(state.read, rows, strict=True)]
        return self._feed(state, rows)

    def _feed(self, state: OtherTokenizerState, rows: Sequence[Sequence[int]]) -> Tensor:
        fed = torch.tensor([[row[0] if row else 0] for row in rows], device=self.model.device)
        logits = self.model.score(TokenTree.chain(fed, [len(row) for row in rows]), state.cache).logits
        state.cache.commit([range(len(row)) for row in rows])
        return logits


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for place, (mine, theirs) in enumerate(zip(one, other)):
        if mine != theirs:
            return place
    return min(len(one), len(other))
