"""Small tokenizers made on the spot: one letter per token, and another that cuts the same letters otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models

from outrider.codecs.text import TextCodec
from outrider.codecs.translation import TextTranslation

LETTERS = "".join(chr(0x4E00 + place) for place in range(4096))
"""As many letters as any toy model has tokens."""


def letter_codec(size: int) -> TextCodec:
    """Token i is letter i."""
    return _codec(list(LETTERS[:size]), [])


def pair_codec(size: int) -> TextCodec:
    """Letters in another order, some missing, and tokens for pairs of letters."""
    letters = list(reversed(LETTERS[: size - 16]))
    merges = [(letters[i], letters[i + 1]) for i in range(0, 32, 2)]
    return _codec([*letters, *("".join(pair) for pair in merges)], merges)


def _codec(pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> TextCodec:
    tokenizer = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return TextCodec(tokenizer)


def toy_translation(size: int) -> TextTranslation:
    return TextTranslation(letter_codec(size), pair_codec(size))
