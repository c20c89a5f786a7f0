"""Tokens in the form that answers use: their text, their bytes, and the offset of each in the text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import final

from outrider.codecs.text import TextCodec

_DECODER = getincrementaldecoder("utf-8")


@final
class TokenTexts:
    """Writes tokens of one vocabulary."""

    def __init__(self, codec: TextCodec, *, by_id: bool = False) -> None:
        """``by_id``: tokens are named ``token_id:17``, so that no two look alike."""
        self._codec, self._by_id = codec, by_id

    def name(self, token: int) -> str:
        """The text of a token. Part of a character becomes U+FFFD; ``bytes_of`` gives its bytes."""
        return f"token_id:{token}" if self._by_id else self._codec.token_bytes(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> list[int]:
        return list(self._codec.token_bytes(token))


@final
class Offsets:
    """Where each token of a text begins, in characters."""

    def __init__(self, codec: TextCodec, *, lead: str = "", shows_special: bool = False) -> None:
        """``lead`` is the prompt's text, given if the tokens begin with the prompt's. ``shows_special``: whether the text
        includes special tokens."""
        self._codec, self._lead, self._shows_special = codec, lead, shows_special
        self._decoder, self._place = _DECODER("replace"), 0

    def next(self, tokens: Sequence[int]) -> list[int]:
        """Offsets of further tokens. A special token has length 0 if the text leaves it out."""
        found: list[int] = []
        for token in tokens:
            found.append(self._place)
            if self._shows_special or not self._codec.is_special(token):
                self._place += self._length(self._codec.token_bytes(token))
        return found

    def _length(self, written: bytes) -> int:
        """Characters that a token completes. Some vocabularies write a space before the first word of a text."""
        is_added = not self._place and written[:1] == b" " and self._lead[:1] not in ("", " ")
        return len(self._decoder.decode(written[is_added:]))
