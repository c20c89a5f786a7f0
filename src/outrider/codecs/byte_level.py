"""Tokenizers of byte-level models: a token for every byte, and a few special ones.

Such a model has no learnt vocabulary, so its folder has no tokenizer file: only a class name in ``tokenizer_config.json``. The
tokenizer made here is an ordinary one without merges. Everything that works on tokenizers (streams, stop strings, grammars,
translation) therefore works on bytes, and a character of n bytes is n tokens.

    id(byte b) = b + byte_offset        ByT5: byte_offset 3, after <pad>, </s> and <unk>   (arXiv 2105.13626)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.codecs.pieces import byte_letters
from outrider.core.errors import ModelError

_BYT5 = {"byte_offset": 3, "special_tokens": ["<pad>", "</s>", "<unk>"], "eos_token": "</s>", "pad_token": "<pad>"}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "ByT5Tokenizer": _BYT5,
    "ByteTokenizer": {"byte_offset": 0, "special_tokens": []},
}
"""Classes of byte tokenizers, each with its settings; a folder's own settings replace them."""


def byte_settings(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a folder with a byte tokenizer, completed by its class's; None for any other tokenizer."""
    name = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    return None if name not in CLASSES else {**CLASSES[name], **settings}


def byte_tokenizer(settings: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer of bytes. ``special_tokens`` have the ids from 0 on; those from ``byte_offset`` on come after the bytes."""
    offset, specials = settings["byte_offset"], list(settings["special_tokens"])
    if not isinstance(offset, int) or offset < 0:
        raise ModelError(f"byte_offset = {offset!r} in tokenizer_config.json is not valid; give the id of byte 0")
    specials[len(specials) : offset] = [f"<unused{place}>" for place in range(len(specials), offset)]
    vocab = {token: place if place < offset else place + 256 for place, token in enumerate(specials)}
    vocab |= {letter: offset + byte for letter, byte in byte_letters().items()}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer
