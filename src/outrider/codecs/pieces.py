"""The bytes of each token of a vocabulary, for any kind of tokenizer.

A byte-level vocabulary writes every byte as a printable character of its own (GPT-2's table), a SentencePiece vocabulary writes
a space as U+2581 and single bytes as <0xAB>. Two vocabularies can be compared only by bytes.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Bytes of every token by its id; None for special tokens and for ids without a token."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    added = set(tokenizer.get_added_tokens_decoder())
    vocab = tokenizer.get_vocab()
    in_bytes = is_byte_level(tokenizer)
    found: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for piece, token in vocab.items():
        if token in special:
            continue
        if token in added:
            found[token] = piece.encode()  # added tokens are written as they read
        else:
            found[token] = piece_bytes(piece, in_bytes=in_bytes)
    return found


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary writes bytes as characters of GPT-2's table."""
    decoder = tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def piece_bytes(piece: str, *, in_bytes: bool) -> bytes | None:
    """Bytes of an ordinary token; None if it is written with characters that no byte has. ``in_bytes``: see
    ``is_byte_level``."""
    return _byte_level(piece) if in_bytes else _sentence_piece(piece)


def special_ids(tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens and how they are written."""
    return {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}


def _sentence_piece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte.group(1), 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _byte_level(piece: str) -> bytes | None:
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return None


def byte_letters() -> dict[str, int]:
    """The character that a byte-level vocabulary writes for each byte. Printable Latin-1 bytes stand for themselves; the
    others are counted up from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = byte_letters()
