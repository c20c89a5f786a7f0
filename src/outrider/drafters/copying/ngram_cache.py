"""An n-gram cache: guess what usually followed the last few tokens, in this request and in all requests before it.

A memory counts what followed every n-gram of up to ``max_ngram`` tokens, in prompts and outputs. The longest known n-gram at
the end of the context proposes its continuations. A guess becomes part of the next guess's context, along a chain or over a
small tree. Backing off to shorter n-grams is from Katz 1987. Drafters of this kind are llama.cpp's lookup decoding and Ou et
al. 2024, arXiv 2404.08698 (ANPD).

    P(t | s) = count(s' t) / sum_t count(s' t),     s': the longest known end of s
    prob(node) = product of P on its path,          a guess needs prob >= min_token_prob

Guesses are copied, not sampled: lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from outrider.core.draft import Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Drafter, Plan, RowState
from outrider.core.lasting_memory import LastingMemory
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TreeRow
from outrider.drafters.copying.copier import Copier
from outrider.drafters.copying.ngram_memory import DEFAULT_ENTRIES, NgramMemory
from outrider.drafters.trees.trie import Limits, Trie, best_first, follow


@dataclass(frozen=True)
class NgramCacheOptions:
    """Which n-grams are learned, and how often one must occur before it is trusted."""

    max_ngram: int = 4
    """Longest context counted, in tokens."""
    min_count: int = 1
    """An n-gram is trusted if it was followed by a token at least this often; otherwise a shorter one is used."""
    min_token_prob: float = 0.1
    """Guesses continue while their path is at least this likely, by the counts."""
    tree: bool = False
    """Grow the most likely tree instead of following the most likely path."""
    learn_prompts: bool = True
    """Learn from prompts as well as from outputs."""
    max_entries: int = DEFAULT_ENTRIES
    """Most n-grams remembered. The least recently used are dropped first."""
    memory: NgramMemory | str | None = None
    """A memory to share between methods, or the file of a saved one. Default: a new, empty one."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_ngram, int) or not 1 <= self.max_ngram <= 16:
            raise OptionError(f"max_ngram = {self.max_ngram!r} is not valid; use a whole number from 1 to 16")
        if self.min_count < 1:
            raise OptionError(f"min_count = {self.min_count} is not valid; use at least 1")
        if not 0 <= self.min_token_prob <= 1:
            raise OptionError(f"min_token_prob = {self.min_token_prob} is not valid; use a number from 0 to 1")
        if self.max_entries < 2:
            raise OptionError(f"max_entries = {self.max_entries} is not valid; use at least 2")

    def new_memory(self, vocab_size: int) -> NgramMemory:
        """The memory these options ask for."""
        return NgramMemory.of(self.memory, vocab_size=vocab_size, max_ngram=self.max_ngram, max_entries=self.max_entries)


@dataclass
class _State(RowState):
    num_learned: list[int]
    """Number of tokens of each row that the memory has counted."""

    def fork(self, rows: Sequence[int]) -> _State:
        return _State([self.num_learned[row] for row in rows])

    def join(self, other: _State) -> _State:
        return _State([*self.num_learned, *other.num_learned])


@final
class NgramCacheDrafter(Copier):
    """Chains or trees of the most frequent continuations."""

    shape: ClassVar = Shape.TREE

    def __init__(self, options: NgramCacheOptions | None = None, *, memory: NgramMemory) -> None:
        self.options = options or NgramCacheOptions()
        self.memory = memory
        """Shared by all requests and by every drafter that is given it."""

    @property
    def memories(self) -> tuple[LastingMemory, ...]:
        return (self.memory,)

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> _State:
        del taps
        if self.options.learn_prompts:
            for row in rows:
                self.memory.learn(row, 0)
        return _State([len(row) for row in rows])

    def copied(self, state: _State, texts: Sequence[Sequence[int]], plan: Plan) -> list[TreeRow]:
        drafted: list[TreeRow] = []
        grow = best_first if self.options.tree else follow
        with self.memory.lock:
            for row, history in enumerate(texts):
                self.finish(state, row, history)  # all rows first: what one has just said may help another
            for history, depth, nodes in zip(texts, plan.max_depth, plan.max_nodes, strict=True):
                place = tuple(history[-self.memory.max_ngram :])
                limits = Limits(depth, nodes, self.options.min_token_prob)
                drafted.append(grow(Trie(history[-1]), place, self._continuations, limits=limits).row())
        return drafted

    def finish(self, state: _State, row: int, tokens: Sequence[int]) -> None:
        """Learn the tokens of a request's last round, which the memory has not seen."""
        self.memory.learn(tokens, state.num_learned[row])
        state.num_learned[row] = len(tokens)

    def _continuations(self, place: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        found, total = self.memory.followers(place, min_count=self.options.min_count)
        # Most frequent first; the newest stands last in the table and goes first among equals.
        ranked = sorted(found.items(), key=lambda item: item[1])[::-1]
        size = self.memory.max_ngram
        return [(token, count / total, (*place, token)[-size:]) for token, count in ranked]


def build(parts: Parts) -> Drafter:
    return NgramCacheDrafter(parts.options, memory=parts.options.new_memory(parts.target.vocab_size))


ROW = MethodRow(
    summary="what usually followed the last few tokens, learned across requests",
    paper="Ou et al. 2024, ANPD (arXiv 2404.08698)",
    drafter=NgramCacheDrafter,
    build=build,
    options=NgramCacheOptions,
    defaults={"num_draft_tokens": 8},
)
