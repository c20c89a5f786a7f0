"""Text to tokens and back: any ``tokenizer.json``, chat templates, and a detokenizer that streams.

Decoding a continuation is not decoding its tokens alone: SentencePiece vocabularies drop the space in front of the first
token, and a character can be spread over several tokens. So the last tokens of the prompt are decoded along and cut off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import WordLevel

from outrider.codecs.byte_level import byte_settings, byte_tokenizer
from outrider.codecs.chat_template import render_chat
from outrider.codecs.pieces import is_byte_level, piece_bytes
from outrider.core.errors import ModelError, RequestError

_OLDER_FILES = ("*.model", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json")
"""Tokenizer files in formats other than tokenizer.json. A folder without any of them has no tokenizer."""
_PREFIX = 6
"""Prompt tokens that are decoded before a continuation: more than any one character needs."""
_LETTERS_PER_TOKEN = 4
_LONG = 8192
"""Length in characters from which encoding a text takes milliseconds."""


@final
class TextCodec:
    """A tokenizer with the settings of its folder."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, settings: Mapping[str, Any] | None = None, chat_template: str | None = None
    ) -> None:
        """Without a tokenizer, prompts are token ids and texts are empty."""
        self.has_tokenizer = tokenizer is not None
        self.tokenizer = tokenizer or Tokenizer(WordLevel({}, unk_token=""))
        self.settings = dict(settings or {})
        self.chat_template = chat_template
        self.eos_ids = frozenset(self._ids_of(self.settings.get("eos_token")))
        self.bos_ids = self._ids_of(self.settings.get("bos_token"))

    @staticmethod
    def from_folder(folder: Path) -> TextCodec:
        """Read tokenizer.json, or let transformers convert an older format."""
        settings = _read_json(folder / "tokenizer_config.json")
        path, in_bytes = folder / "tokenizer.json", byte_settings(settings)
        if path.exists():
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise ModelError(f"{path} cannot be read as a tokenizer ({error}); fetch it again") from None
        elif in_bytes is not None:
            tokenizer, settings = byte_tokenizer(in_bytes), in_bytes
        elif any(list(folder.glob(pattern)) for pattern in _OLDER_FILES):
            tokenizer = _convert(folder)
        else:
            tokenizer = None
        template_file = folder / "chat_template.jinja"
        older = _read_json(folder / "chat_template.json").get("chat_template")  # where processors of images used to keep it
        template = template_file.read_text() if template_file.exists() else settings.get("chat_template") or older
        codec = TextCodec(tokenizer, settings=settings, chat_template=template if isinstance(template, str) else None)
        for name in ("generation_config.json", "config.json"):
            codec.add_eos(_read_json(folder / name).get("eos_token_id"))
        return codec

    def add_eos(self, ids: int | Sequence[int] | None) -> None:
        """Add end-of-sequence tokens that a model file declares."""
        self.eos_ids |= frozenset([ids] if isinstance(ids, int) else ids or ())

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def same_vocabulary(self, other: TextCodec) -> bool:
        """Whether both vocabularies are equal token for token."""
        return self.tokenizer.get_vocab() == other.tokenizer.get_vocab()

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode_within(self, text: str, limit: int, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text of at most ``limit`` tokens. Longer text is refused early, by its length or by the tokens of its first
        part."""
        if len(text) > limit * self.longest_token:
            raise _too_long(f"has {len(text)} characters, more than {limit} tokens can hold,", limit)
        size = _LETTERS_PER_TOKEN * limit
        while size < len(text):
            num_tokens = len(self.encode(text[:size], add_special_tokens=False))
            if num_tokens > limit + self.longest_token:  # a word that was cut may have a few tokens more than the whole one
                raise _too_long(f"has more than {num_tokens - self.longest_token} tokens", limit)
            size *= 2
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a long text, computed while other threads can run."""
        if len(text) < _LONG:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not self.has_tokenizer:
            raise RequestError("this model came without a tokenizer; give prompts as token ids, or add its tokenizer.json")
        ids = self._ids(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self.settings.get("add_bos_token") and ids[:1] != self.bos_ids[:1]:
            ids = [*self.bos_ids, *ids]
        if not ids and self.bos_ids:
            return list(self.bos_ids)
        return ids

    def decode(self, ids: Sequence[int], *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a continuation of ``prompt_ids``."""
        prefix = list(prompt_ids[-_PREFIX:])
        before = self.tokenizer.decode(prefix, skip_special_tokens=skip_special_tokens)
        return self.tokenizer.decode([*prefix, *ids], skip_special_tokens=skip_special_tokens)[len(before) :]

    def token_text(self, token: int) -> str:
        """The text of one token on its own, for pictures."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text. Special tokens add the bytes of their names."""
        added = self._added.get(token)
        if added is not None:
            return added.content.encode()
        piece = self.tokenizer.id_to_token(token)
        known = None if piece is None else piece_bytes(piece, in_bytes=self._in_bytes)
        return self.token_text(token).encode() if known is None else known

    def is_special(self, token: int) -> bool:
        """Whether texts leave the token out."""
        return token in self._added and self._added[token].special

    @cached_property
    def _added(self) -> Mapping[int, AddedToken]:
        return self.tokenizer.get_added_tokens_decoder()

    @cached_property
    def _in_bytes(self) -> bool:
        return is_byte_level(self.tokenizer)

    def new_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Callable[[], TokenStream]:
        """Makes detokenizers for continuations of ``prompt_ids``."""
        return lambda: TokenStream(self.tokenizer, prompt_ids[-_PREFIX:], skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Tokens of a conversation, ready for the assistant's next turn."""
        return self._ids(self.chat_text(messages, **variables), add_special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """A conversation in the format of the chat template."""
        if self.chat_template is None:
            raise RequestError("this model has no chat template; use generate with a plain prompt, or load a chat model")
        return render_chat(self.chat_template, messages, {**self._special_texts(), **variables})

    def _special_texts(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return {name: _content(self.settings[name]) for name in names if self.settings.get(name)}

    def _ids_of(self, token: Any) -> list[int]:
        found = self.tokenizer.token_to_id(_content(token)) if token else None
        return [] if found is None else [found]


@final
class TokenStream:
    """Detokenizes one token at a time."""

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        for token in prefix:
            self.push(token)

    def push(self, token: int) -> str:
        return self.decoder.step(self.tokenizer, token) or ""


def _too_long(what: str, limit: int) -> RequestError:
    return RequestError(f"the prompt {what} and the model's context holds {limit + 1}; shorten the prompt")


def _content(token: Any) -> str:
    """Special tokens are written as strings or as {"content": ...}."""
    return token["content"] if isinstance(token, Mapping) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch it again") from None


def _convert(folder: Path) -> Tokenizer:
    """Older tokenizer files, through transformers."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), use_fast=True).backend_tokenizer
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{folder} has no usable tokenizer ({reason}); add its tokenizer.json") from None
