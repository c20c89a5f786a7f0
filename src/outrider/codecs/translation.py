"""Translation by text: decode with one tokenizer, encode with the other.

Special tokens have no text, so a text is translated piece by piece between them, and each goes to the other tokenizer's token
of the same writing or of the same role (begin, end), or is left out. A continuation is encoded together with the words before
it, because a token may hold the space in front of its word; it is used only where it begins at the end of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from outrider.codecs.pieces import special_ids, token_bytes
from outrider.codecs.text import TextCodec
from outrider.core.translation import Reading, Translation

_BROKEN = "\ufffd"
"""How decoders write bytes that are no character (yet)."""
_WINDOW = 8
"""Tokens encoded along in front of a continuation."""
_OVERLAP = 32
"""Tokens of a known reading that are read again with what follows."""


@final
class TextTranslation(Translation):
    """Between the tokenizers of a target and of a draft model."""

    def __init__(self, target: TextCodec, draft: TextCodec) -> None:
        self.target, self.draft = target, draft
        self._target_specials, self._draft_specials = special_ids(target.tokenizer), special_ids(draft.tokenizer)
        self._begin = _begin_of(draft)
        by_text = {text: token for token, text in self._draft_specials.items()}
        self._special_to_draft = {token: by_text.get(text) for token, text in self._target_specials.items()}
        for mine, other in ((target.bos_ids, draft.bos_ids), (target.eos_ids, draft.eos_ids)):
            for token in mine:
                if self._special_to_draft.get(token) is None:
                    self._special_to_draft[token] = next(iter(sorted(other)), None)

    def to_draft(self, tokens: Sequence[int], before: Reading | None = None) -> Reading | None:
        ids = None if before is None else self._extended(tokens, before)
        ids = self._whole(tokens) if ids is None else ids
        return Reading(len(tokens), ids) if ids else None

    def _extended(self, tokens: Sequence[int], before: Reading) -> list[int] | None:
        """The ids of a text whose beginning is known; empty inside a character, None where the whole must be read again."""
        new, end = list(tokens[before.num_tokens :]), before.ids[-_OVERLAP:]
        if len(end) < _OVERLAP or any(t in self._special_to_draft for t in new) or any(t in self._draft_specials for t in end):
            return None
        text = self.target.decode(new, prompt_ids=tokens[: before.num_tokens], skip_special_tokens=False)
        if text.endswith(_BROKEN):
            return []
        ids = self._encode(self.draft, self.draft.tokenizer.decode(end, skip_special_tokens=False) + text)
        agreed = ids[: _OVERLAP // 2] == end[: _OVERLAP // 2]  # so it goes on from where the known ids are right
        return [*before.ids[:-_OVERLAP], *ids] if agreed else None

    def _whole(self, tokens: Sequence[int]) -> list[int]:
        """The ids of a text; none inside a character."""
        ids: list[int] = []
        text, start = "", 0
        for end in range(len(tokens) + 1):
            if end < len(tokens) and tokens[end] not in self._special_to_draft:
                continue
            text = self.target.tokenizer.decode(list(tokens[start:end]), skip_special_tokens=False)
            ids += self._encode(self.draft, text)
            special = self._special_to_draft[tokens[end]] if end < len(tokens) else None
            ids += [] if special is None else [special]
            start = end + 1
        if text.endswith(_BROKEN):
            return []
        return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    def to_target(self, tokens: Sequence[int], context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        stop = next((i for i, token in enumerate(drafted) if token in self._draft_specials), len(drafted))
        text = self.draft.decode(drafted[:stop], prompt_ids=context, skip_special_tokens=False).rstrip(_BROKEN)
        found = self._continued(tokens, text)
        ends = stop < len(drafted) and drafted[stop] in self.draft.eos_ids and found is not None
        return [*(found or []), *(sorted(self.target.eos_ids)[:1] if ends else [])]

    @cached_property
    def _shared(self) -> Tensor:
        by_bytes: dict[bytes, int] = {}
        for token, piece in enumerate(token_bytes(self.target.tokenizer)):
            if piece is not None:
                by_bytes.setdefault(piece, token)
        pieces = token_bytes(self.draft.tokenizer)
        shared = [-1 if piece is None else by_bytes.get(piece, -1) for piece in pieces]
        ends = sorted(self.target.eos_ids)[:1]  # last, so that a token with several roles is read as the end
        for mine in [*self._special_to_draft, *ends]:
            other = self._special_to_draft[mine]
            if other is not None:
                shared[other] = mine
        return torch.tensor(shared)

    def shared(self) -> Tensor:
        return self._shared

    def _continued(self, tokens: Sequence[int], text: str) -> list[int] | None:
        """The target's tokens of ``text`` after ``tokens``; None where it does not begin at a token's end."""
        window: list[int] = []
        for token in reversed(tokens[-_WINDOW:]):
            if token in self._special_to_draft:
                break
            window.insert(0, token)
        before = self.target.tokenizer.decode(window, skip_special_tokens=False)
        if before.startswith(_BROKEN) or not text:
            return [] if not text else None
        encoded = self.target.tokenizer.encode(before + text, add_special_tokens=False)
        for place, (start, end) in enumerate(encoded.offsets):
            if end > len(before):
                return list(encoded.ids[place:]) if start >= len(before) else self._joined(window, before, text)
        return None

    def _joined(self, window: list[int], before: str, text: str) -> list[int] | None:
        """The text on its own, where that reads the same after the window."""
        ids = self._encode(self.target, text)
        whole = self.target.tokenizer.decode([*window, *ids], skip_special_tokens=False)
        return ids if whole == before + text else None

    @staticmethod
    def _encode(codec: TextCodec, text: str) -> list[int]:
        return list(codec.tokenizer.encode(text, add_special_tokens=False).ids) if text else []


def _begin_of(codec: TextCodec) -> list[int]:
    """The tokens a codec puts in front of every text."""
    with_specials, without = codec.encode("a"), codec.tokenizer.encode("a", add_special_tokens=False).ids
    return with_specials[: with_specials.index(without[0])] if without and without[0] in with_specials else []
