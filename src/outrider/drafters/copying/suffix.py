"""Suffix decoding: find the longest contexts like the present one, here and in earlier outputs, and copy what usually followed.

One suffix automaton holds the request's own prompt and output, others (the memory) the outputs of all requests. Every suffix of
the context that was seen before proposes a path or a tree; longer matches may propose more guesses. The proposal with the
largest expected number of accepted guesses wins. Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975.

    budget(m) = floor(factor * m + offset)                       m: tokens matched
    prob(node) = product of count(s t) / followed(s) on its path,    a guess needs prob >= min_token_prob
    score = sum of prob;    the best score wins, then the longer match, then the request's own text

Guesses are copied, not sampled: lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from outrider.core.draft import Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Drafter, Plan
from outrider.core.lasting_memory import LastingMemory
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TreeRow
from outrider.drafters.copying.copier import Copier
from outrider.drafters.copying.suffix_automaton import SuffixAutomaton, Tail
from outrider.drafters.copying.suffix_memory import MIN_TOKENS, SharedText, SuffixMemory
from outrider.drafters.per_row import PerRow
from outrider.drafters.trees.trie import Limits, Trie, best_first, follow


@dataclass(frozen=True)
class SuffixOptions:
    """How much a match is trusted, and how much is remembered."""

    max_match: int = 64
    """Longest context looked at, in tokens."""
    factor: float = 1.0
    """Guesses per matched token."""
    offset: float = 0.0
    """Guesses added to that number; may be negative."""
    min_token_prob: float = 0.1
    """Guesses continue while their path is at least this likely, by the counts."""
    tree: bool = False
    """Grow the most likely tree instead of following the most likely path."""
    memory_tokens: int = 500_000
    """Tokens of all requests' outputs to remember. 0 uses only the request's own text."""
    memory: SuffixMemory | str | None = None
    """A memory to share between methods, or the file of a saved one. Default: a new, empty one."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_match, int) or self.max_match < 1:
            raise OptionError(f"max_match = {self.max_match!r} is not valid; use a whole number of at least 1")
        if not self.factor >= 0 or not self.factor * self.max_match + self.offset >= 1:
            raise OptionError(
                f"factor = {self.factor} and offset = {self.offset} leave no guess for a match of {self.max_match} tokens; "
                "use factor >= 0 and factor * max_match + offset >= 1"
            )
        if not 0 <= self.min_token_prob <= 1:
            raise OptionError(f"min_token_prob = {self.min_token_prob} is not valid; use a number from 0 to 1")
        if self.memory_tokens != 0 and self.memory_tokens < MIN_TOKENS:
            raise OptionError(f"memory_tokens = {self.memory_tokens} is too few; use at least {MIN_TOKENS}, or 0 for none")

    def budget(self, match_len: int) -> int:
        """Number of guesses for a match of ``match_len`` tokens."""
        return max(0, int(self.factor * match_len + self.offset + 1e-6))

    def new_memory(self, vocab_size: int) -> SuffixMemory | None:
        """The memory these options ask for."""
        if not self.memory_tokens:
            return None
        return SuffixMemory.of(self.memory, vocab_size=vocab_size, max_tokens=self.memory_tokens, max_match=self.max_match)


@dataclass(eq=False)
class _Row:
    """One request: its own text, and how much of it the memory has learned."""

    own: SuffixAutomaton
    tail: Tail
    shared: SharedText

    def copy(self) -> _Row:
        return _Row(self.own.copy(), self.tail.copy(), self.shared.copy())


@final
class SuffixDecoding(Copier):
    """Paths or trees copied from the request's own text and from a memory of earlier outputs."""

    shape: ClassVar = Shape.TREE

    def __init__(self, options: SuffixOptions | None = None, *, memory: SuffixMemory | None = None) -> None:
        self.options = options or SuffixOptions()
        self.memory = memory
        """Shared by all requests and by every drafter that is given it. None uses only each request's own text."""

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return () if self.memory is None else (self.memory,)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> PerRow[_Row]:
        del taps
        state = PerRow([_Row(SuffixAutomaton(self.options.max_match), Tail(), SharedText(len(row))) for row in rows])
        for row, history in zip(state.rows, rows, strict=True):
            row.own.extend(row.tail, history)
        return state

    def copied(self, state: PerRow[_Row], texts: Sequence[Sequence[int]], plan: Plan) -> list[TreeRow]:
        drafted: list[TreeRow] = []
        with self.memory.lock if self.memory else nullcontext():
            for row, history in zip(state.rows, texts, strict=True):
                self._learn(row, history)  # all rows first: what one has just said may help another
            for row, history, depth, nodes in zip(state.rows, texts, plan.max_depth, plan.max_nodes, strict=True):
                limits = Limits(depth, nodes, self.options.min_token_prob)
                drafted.append(self._draft(row, history, limits).row())
        return drafted

    def finish(self, state: PerRow[_Row], row: int, tokens: Sequence[int]) -> None:
        """Add the tokens of a finished request's last round to the memory."""
        if self.memory:
            self.memory.share(state.rows[row].shared, tokens)

    def _learn(self, row: _Row, history: Sequence[int]) -> None:
        row.own.extend(row.tail, history[row.own.num_tokens :])
        if self.memory:
            self.memory.share(row.shared, history)

    def _draft(self, row: _Row, history: Sequence[int], limits: Limits) -> Trie:
        """The best-scoring guesses over all matches of all texts."""
        best, best_score = Trie(history[-1]), 0.0
        if not limits.max_depth:
            return best
        for automaton, state, match_len in self._matches(row, history):
            for place, size in automaton.suffixes(state, match_len):
                budget = self.options.budget(size)
                if min(budget, limits.max_nodes) <= best_score:
                    break  # a probability is at most 1: no shorter match can reach the score either
                grown = self._grow(Trie(history[-1]), automaton, place, limits.within(budget))
                if grown.score > best_score:
                    best, best_score = grown, grown.score
        return best

    def _grow(self, trie: Trie, automaton: SuffixAutomaton, place: int, limits: Limits) -> Trie:
        if self.options.tree:
            return best_first(trie, place, automaton.children, limits=limits)
        return follow(trie, place, automaton.best, limits=limits)

    def _matches(self, row: _Row, history: Sequence[int]) -> Iterator[tuple[SuffixAutomaton, int, int]]:
        """Every text with its longest match of the context, the request's own first."""
        yield row.own, row.tail.context, row.tail.context_len
        if self.memory:
            for automaton in self.memory.automata:
                yield automaton, *automaton.match(history)


def build(parts: Parts) -> Drafter:
    return SuffixDecoding(parts.options, memory=parts.options.new_memory(parts.target.vocab_size))


ROW = MethodRow(
    summary="copies from the request's own text and all earlier outputs, as far as the match deserves",
    paper="Oliaro et al. 2024, SuffixDecoding (arXiv 2411.04975)",
    drafter=SuffixDecoding,
    build=build,
    options=SuffixOptions,
    defaults={"num_draft_tokens": 16},
)
