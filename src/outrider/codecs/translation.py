"""Translation by text: decode with one tokenizer, encode with the other.

Special tokens have no text, so a text is translated piece by piece between them. Each special token becomes the other
tokenizer's token of the same writing or role (begin, end), or is left out. A continuation is encoded together with the words
before it, because a token may hold the space in front of its word. It is used only where it begins at the end of a token.
Inside a character, which byte-level targets say in several tokens, the draft reads on before it (``unfinished.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from outrider.codecs.pieces import special_ids, token_bytes
from outrider.codecs.text import TextCodec
from outrider.codecs.unfinished import num_settled, split_character
from outrider.core.translation import DraftReading, Translation

_BROKEN = "\ufffd"
"""The character that decoders write for bytes that are not, or not yet, a character."""
_WINDOW = 8
"""Number of tokens before a continuation that are encoded along with it."""
_OVERLAP = 32
"""Number of tokens of a known reading that are read again with the text that follows."""


@final
class TextTranslation(Translation):
    """Translates between the tokenizers of a target and of a draft model."""

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

    def to_draft(self, tokens: Sequence[int], before: DraftReading | None = None) -> DraftReading | None:
        settled = tokens[: num_settled(tokens, self._target_pieces)]
        ids = None if before is None else self._extended(settled, before)
        ids = self._whole(settled) if ids is None else ids
        return DraftReading(len(settled), ids) if ids else None

    def _extended(self, tokens: Sequence[int], before: DraftReading) -> list[int] | None:
        """The ids of a text whose beginning was read before; None if the whole text must be read again."""
        new, end = list(tokens[before.num_tokens :]), self._whole_characters(before.ids[-_OVERLAP:])
        if len(end) < _OVERLAP // 2 or any(t in self._special_to_draft for t in new) or self._draft_specials.keys() & set(end):
            return None
        text = self.target.decode(new, prompt_ids=tokens[: before.num_tokens], skip_special_tokens=False)
        ids = self._encode(self.draft, self.draft.tokenizer.decode(end, skip_special_tokens=False) + text)
        agreed = ids[: _OVERLAP // 2] == end[: _OVERLAP // 2]  # so it goes on from where the known ids are right
        return [*before.ids[: -len(end)], *ids] if agreed else None

    def _whole_characters(self, ids: Sequence[int]) -> list[int]:
        """The draft's ids, from the first character that begins in them."""
        begins = (place for place, token in enumerate(ids) if not split_character(self._draft_pieces[token] or b"")[0])
        return list(ids[next(begins, len(ids)) :])

    def _whole(self, tokens: Sequence[int]) -> list[int]:
        """The ids of a text."""
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
        return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    def to_target(self, tokens: Sequence[int], context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        stop = next((i for i, token in enumerate(drafted) if token in self._draft_specials), len(drafted))
        text = self.draft.decode(drafted[:stop], prompt_ids=context, skip_special_tokens=False).rstrip(_BROKEN)
        found = self._after(tokens, text)
        ends = stop < len(drafted) and drafted[stop] in self.draft.eos_ids and found is not None
        return [*(found or []), *(sorted(self.target.eos_ids)[:1] if ends else [])]

    @cached_property
    def _target_pieces(self) -> list[bytes | None]:
        return token_bytes(self.target.tokenizer)

    @cached_property
    def _draft_pieces(self) -> list[bytes | None]:
        return token_bytes(self.draft.tokenizer)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """The target's first token of some bytes."""
        places = reversed(list(enumerate(self._target_pieces)))
        return {piece: token for token, piece in places if piece is not None}

    @cached_property
    def _shared(self) -> Tensor:
        shared = [-1 if piece is None else self._by_bytes.get(piece, -1) for piece in self._draft_pieces]
        ends = sorted(self.target.eos_ids)[:1]  # last, so that a token with several roles is read as the end
        for mine in [*self._special_to_draft, *ends]:
            other = self._special_to_draft[mine]
            if other is not None:
                shared[other] = mine
        return torch.tensor(shared)

    def shared(self) -> Tensor:
        return self._shared

    def _after(self, tokens: Sequence[int], text: str) -> list[int] | None:
        """The target's tokens of ``text``, which begins where the draft stopped reading; None if it does not fit."""
        waiting = tokens[num_settled(tokens, self._target_pieces) :]
        said, data = b"".join(self._target_pieces[token] or b"" for token in waiting), text.encode()
        if not waiting:
            return self._continued(tokens, text)
        if len(data) <= len(said) or not data.startswith(said):
            return None
        rest, more = split_character(data[len(said) :])
        ids = [self._by_bytes.get(bytes([byte])) for byte in rest]
        known = [token for token in ids if token is not None]
        return [*known, *(self._continued([*tokens, *known], more.decode()) or [])] if len(known) == len(ids) else None

    def _continued(self, tokens: Sequence[int], text: str) -> list[int] | None:
        """The target's tokens of ``text`` after ``tokens``; None if it does not begin at a token boundary."""
        window: list[int] = []
        for token in reversed(tokens[-_WINDOW:]):
            if token in self._special_to_draft:
                break
            window.insert(0, token)
        before = self.target.tokenizer.decode(window, skip_special_tokens=False)
        while before.startswith(_BROKEN) and window:  # it began inside a character
            window = window[1:]
            before = self.target.tokenizer.decode(window, skip_special_tokens=False)
        if not text:
            return []
        encoded = self.target.tokenizer.encode(before + text, add_special_tokens=False)
        for place, (start, end) in enumerate(encoded.offsets):
            if end > len(before):
                return list(encoded.ids[place:]) if start >= len(before) else self._joined(window, before, text)
        return None

    def _joined(self, window: list[int], before: str, text: str) -> list[int] | None:
        """The tokens of the text on its own, if they are the same after the preceding tokens."""
        ids = self._encode(self.target, text)
        whole = self.target.tokenizer.decode([*window, *ids], skip_special_tokens=False)
        return ids if whole == before + text else None

    @staticmethod
    def _encode(codec: TextCodec, text: str) -> list[int]:
        return list(codec.tokenizer.encode(text, add_special_tokens=False).ids) if text else []


def _begin_of(codec: TextCodec) -> list[int]:
    """The tokens that a codec puts before every text."""
    with_specials, without = codec.encode("a"), codec.tokenizer.encode("a", add_special_tokens=False).ids
    return with_specials[: with_specials.index(without[0])] if without and without[0] in with_specials else []
