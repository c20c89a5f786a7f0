"""Tokens at the end of a text that stop inside a character.

A byte-level target says a character in up to four tokens. While a character is incomplete, the text that both tokenizers share
ends before it. The draft continues from there, and its guess must begin with the bytes that the target has already written.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_settled(tokens: Sequence[int], pieces: Sequence[bytes | None]) -> int:
    """Number of tokens before the first one that holds bytes of an unfinished last character; all tokens if the last character
    is complete."""
    end = b""
    for place in range(len(tokens) - 1, max(-1, len(tokens) - 5), -1):
        piece = pieces[tokens[place]] if tokens[place] < len(pieces) else None
        if piece is None:  # a special token: the text ends there
            break
        end = piece + end
        missing = num_missing(end)
        if missing is not None:
            return place if missing else len(tokens)
    return len(tokens)


def num_missing(data: bytes) -> int | None:
    """Bytes that the last character of ``data`` still needs; 0 after a complete or invalid one, None if ``data`` holds no first
    byte of a character."""
    for size, byte in enumerate(reversed(data[-4:]), 1):
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return 0 if byte >= 0xF8 or size >= length else length - size
    return None if len(data) < 4 else 0


def split_character(data: bytes) -> tuple[bytes, bytes]:
    """The rest of a character inside which ``data`` begins, and everything after it."""
    size = next((place for place, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
    return data[:size], data[size:]
