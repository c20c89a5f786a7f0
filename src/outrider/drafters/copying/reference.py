"""Copying from references: answers about documents quote them, so look the last words up there and copy what follows.

The last n tokens are looked up in the request's own history and in reference documents given with the method, longest n first.
Among matches of equal length the request's own wins, then the later document, then the later place. What followed is proposed
as a chain. Yang et al. 2023, "Inference with Reference" (LLMA), arXiv 2304.04487.

    draft = text[j : j + K],   text[j - n : j] = the last n tokens,   n as large as possible, then j as late as possible

Guesses are copied, not sampled: lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, final

from torch import Tensor

from outrider.core.draft import Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Drafter, Plan
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TreeRow
from outrider.drafters.copying.copier import Copier
from outrider.drafters.copying.prompt_lookup import NgramIndex, PromptLookupOptions
from outrider.drafters.per_row import PerRow

_BORDER = -1
"""Separates documents. It is not a token, so no match and no copy crosses it."""


@dataclass(frozen=True)
class ReferenceOptions:
    """What to copy from, and how much must match first."""

    references: Sequence[Sequence[int]] = ()
    """Documents as token ids (the caller encodes text); without any, only the request's own tokens are copied."""
    max_ngram: int = 6
    """Longest match looked for, in tokens."""
    min_ngram: int = 1
    """Shortest match that is trusted."""

    def __post_init__(self) -> None:
        self.matching()
        for number, document in enumerate(self.references, 1):
            if isinstance(document, str) or not all(isinstance(token, int) and token >= 0 for token in document):
                raise OptionError(f"reference {number} is not a list of token ids; encode it with the model's tokenizer first")

    def matching(self) -> PromptLookupOptions:
        """The options shared with prompt lookup, which checks the two lengths."""
        return PromptLookupOptions(max_ngram=self.max_ngram, min_ngram=self.min_ngram)


@final
class ReferenceLookup(Copier):
    """Chains copied from reference documents and from the request's own tokens."""

    shape: ClassVar = Shape.CHAIN

    def __init__(self, options: ReferenceOptions | None = None, *, vocab_size: int) -> None:
        self.options = options or ReferenceOptions()
        self._matching = self.options.matching()
        self._shelf: list[int] = []
        """All documents in one row, with a border after each."""
        self._index = NgramIndex(self._matching)
        for document in self.options.references:
            if document and max(document) >= vocab_size:
                raise OptionError(
                    f"a reference holds token {max(document)} and the vocabulary is 0 to {vocab_size - 1}; "
                    "encode references with the model's own tokenizer"
                )
            self._put(document)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> PerRow[NgramIndex]:
        del taps
        state = PerRow([NgramIndex(self._matching) for _ in rows])
        for index, history in zip(state.rows, rows, strict=True):
            index.extend(history)
        return state

    def copied(self, state: PerRow[NgramIndex], texts: Sequence[Sequence[int]], plan: Plan) -> list[TreeRow]:
        rows: list[TreeRow] = []
        for own, history, depth, nodes in zip(state.rows, texts, plan.max_depth, plan.max_nodes, strict=True):
            own.extend(history)
            length = min(depth, nodes)
            chain = [history[-1], *(self._copy(own, history, length) if length else [])]
            rows.append((chain, list(range(-1, len(chain) - 1))))
        return rows

    def _put(self, document: Sequence[int]) -> None:
        self._shelf.extend(document)
        self._index.extend(self._shelf)
        self._shelf.append(_BORDER)
        self._index.num_indexed = len(self._shelf)  # skip the border: a document's end has nothing after it to copy

    def _copy(self, own: NgramIndex, history: Sequence[int], length: int) -> list[int]:
        own_size, _ = self._longest(own, history, len(history) - 1)
        size, start = self._longest(self._index, history, len(history))
        if own_size >= size:
            return own.continuation(history, length)
        return list(takewhile(lambda token: token != _BORDER, self._shelf[start : start + length]))

    def _longest(self, index: NgramIndex, history: Sequence[int], limit: int) -> tuple[int, int]:
        """Length of the longest match, and the place after its latest occurrence; 0 if there is none."""
        for size in range(min(self._matching.max_ngram, limit), self._matching.min_ngram - 1, -1):
            start = index.next_start.get(tuple(history[-size:]))
            if start is not None:
                return size, start
        return 0, 0


def build(parts: Parts) -> Drafter:
    return ReferenceLookup(parts.options, vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="copies from documents given with the request, and from the text itself",
    paper="Yang et al. 2023, LLMA (arXiv 2304.04487)",
    drafter=ReferenceLookup,
    build=build,
    options=ReferenceOptions,
    defaults={"num_draft_tokens": 8},
    texts=("references",),
)
