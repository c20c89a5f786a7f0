"""Banned words, and lists of allowed tokens. Both depend only on the tokens so far, so they are exact on every path of a tree.

A word of one token is always banned. Of a word of several tokens, the last one is banned where the others come just before. A
word is banned in both spellings of the tokenizer, at the beginning of a text and after a space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.codecs.text import TextCodec
from outrider.core.errors import RequestError


@dataclass(frozen=True, eq=False)
class BannedSequences:
    """A logits processor that forbids sequences of tokens."""

    sequences: Sequence[Sequence[int]]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        for sequence in self.sequences:
            size = len(sequence) - 1
            if not size or list(tokens[-size:]) == list(sequence[:-1]):
                logits[sequence[-1]] = -torch.inf
        return logits


@dataclass(frozen=True, eq=False)
class OnlyTokens:
    """A logits processor that allows only some tokens."""

    allowed: Tensor
    """[V] boolean."""

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        del tokens
        return logits.masked_fill(~self.allowed.to(logits.device), -torch.inf)


def banned_words(codec: TextCodec, words: Sequence[str]) -> BannedSequences:
    """Ban words as they are spelt at the beginning of a text and inside it."""
    spelt = {tuple(codec.encode(lead + word, add_special_tokens=False)) for word in words for lead in ("", " ")}
    return BannedSequences(sorted(ids for ids in spelt if ids))


def only_tokens(ids: Sequence[int], vocab_size: int) -> OnlyTokens:
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"allowed_token_ids holds token {bad}; use ids of the vocabulary, 0 to {vocab_size - 1}")
    allowed = torch.zeros(vocab_size, dtype=torch.bool)
    allowed[list(ids)] = True
    return OnlyTokens(allowed)
