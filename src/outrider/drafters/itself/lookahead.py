"""Lookahead decoding: a window of Jacobi iterations runs ahead of the text, and the n-grams it passes through are guesses.

Jacobi iteration seldom finds a token at its right position, but the sequences it produces often occur a little later. So the
last N - 1 iterations of W positions ahead are kept as a window. Each pass adds a row: the target's choice below every column.
Every column, read downwards, is an n-gram of the target's own choices. A pool keeps the last G n-grams for each first token;
those that begin with the current token are verified in the same pass. (Fu et al. 2024, "Break the Sequential Dependency of LLM
Inference Using Lookahead Decoding", arXiv 2402.02057.)

    row 0     c  a1 a2 a3 ..      a chain below the root c           new[j] = argmax after the path  a1 .. aj, b_j, .., z_j
    row 1     b0 b1 b2 b3 ..      b_j below a_j                      pool[a_j] <- (b_j, .., z_j, new[j])
    row N-2   z0 z1 z2 z3 ..      z_j below row N-3's j              then row l <- row l + 1, last row <- new

The window is a set of paths below the root, and so are the guesses. Merged into one prefix tree, they need no attention mask of
their own. Window nodes may be accepted like any guess. Lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TokenTree
from outrider.drafters.per_row import PerRow
from outrider.drafters.trees.trie import Limits, Trie

Ngram = tuple[int, ...]


@dataclass(frozen=True)
class LookaheadOptions:
    """The window and the pool. The plan caps the whole tree; a plan without guesses has no window either."""

    window: int = 15
    """W: number of columns of the window."""
    ngram: int = 5
    """N: tokens of an n-gram, its key included. Guesses are N - 1 tokens long; the window has N - 1 rows."""
    max_guesses: int = 15
    """G: n-grams kept and verified for each first token."""
    pool_text: bool = True
    """Whether the pool also holds the n-grams of the request's prompt and output."""

    def __post_init__(self) -> None:
        for name, value, least in (("window", self.window, 1), ("ngram", self.ngram, 2), ("max_guesses", self.max_guesses, 1)):
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name} = {value!r} is not valid; use a whole number of at least {least}")


class NgramPool:
    """For each first token, its last G different continuations of N - 1 tokens. The least recently seen is dropped first."""

    def __init__(self, max_guesses: int) -> None:
        self.max_guesses = max_guesses
        self.entries: dict[int, dict[Ngram, None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add ``ngram`` as the newest of its first token."""
        guesses = self.entries.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        guesses.pop(rest, None)
        guesses[rest] = None
        if len(guesses) > self.max_guesses:
            del guesses[next(iter(guesses))]

    def guesses(self, token: int) -> list[Ngram]:
        """Continuations of ``token``, newest first."""
        return list(reversed(self.entries.get(token, {})))

    def copy(self) -> NgramPool:
        twin = NgramPool(self.max_guesses)
        twin.entries = {token: dict(guesses) for token, guesses in self.entries.items()}
        return twin


@dataclass
class _Row:
    """One request: its window, its pool, and the nodes of the window's last row in the tree being scored."""

    pool: NgramPool
    levels: list[list[int]]
    """The window, row 0 first. Its first token is the root, which is set in every round."""
    num_read: int = 0
    ends: list[int] = field(default_factory=list)
    """Node of each column's last token; -1 for a column that did not fit."""

    def column(self, index: int) -> list[int]:
        """The path from the root to the end of a column."""
        return [*self.levels[0][1 : index + 1], *(level[index] for level in self.levels[1:])]

    def learn(self, choices: Sequence[int], ngram: int) -> None:
        """Collect the n-grams of the columns, then shift the window by one token. A full window drops its oldest row."""
        scored = [end >= 0 for end in self.ends]
        if not any(scored):
            return
        full = len(self.levels) == ngram - 1
        new = [choice if known else last for choice, known, last in zip(choices, scored, self.levels[-1])]
        for index in range(len(new)):
            if full and scored[index]:
                self.pool.add([*(level[index] for level in self.levels), new[index]])
        levels = [*self.levels, new]
        # The first column of row 0 is the root's place; a growing window gives up one column per pass instead of a row.
        self.levels = levels[1:] if full else [level[1:] for level in levels]

    def copy(self) -> _Row:
        return _Row(self.pool.copy(), [list(level) for level in self.levels], self.num_read, list(self.ends))


@final
class Lookahead(Drafter):
    """Trees of pooled n-grams, and of the window that finds new ones."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.TREE
    draws = Draws.DETERMINISTIC
    drafts_alone = True
    reads_logits = True

    def __init__(self, options: LookaheadOptions | None = None) -> None:
        self.options = options or LookaheadOptions()

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> PerRow[_Row]:
        """Fill row 0 with tokens of the prompt, with one extra column for every row still to be added."""
        del taps
        width = self.options.window + self.options.ngram - 2
        return PerRow([_Row(NgramPool(self.options.max_guesses), [random.Random(0).choices(row, k=width)]) for row in rows])

    def propose(self, state: PerRow[_Row], context: Context, plan: Plan) -> Draft:
        trees: list[tuple[list[int], list[int]]] = []
        for row, history, depth, nodes in zip(state.rows, context.tokens, plan.max_depth, plan.max_nodes, strict=True):
            if self.options.pool_text:
                self._read(row, history)
            row.levels[0][0] = history[-1]
            trees.append(_fill(Trie(history[-1]), row, Limits(depth, nodes)))
        return Draft(TokenTree.of_rows(trees, context.device), self.draws)

    def observe(self, state: PerRow[_Row], observation: Observation) -> None:
        """The target's choices below the columns become the window's next row. Choices at accepted nodes are not needed."""
        logits = observation.scores.logits
        width = max(len(row.ends) for row in state.rows)
        if not width:  # nobody asked for guesses
            return
        ends = torch.tensor([[*row.ends, *[-1] * (width - len(row.ends))] for row in state.rows], device=logits.device)
        rows = torch.arange(len(ends), device=logits.device)[:, None]
        choices: list[list[int]] = logits[rows, ends.clamp(min=0)].argmax(-1).tolist()
        for row, chosen in zip(state.rows, choices, strict=True):
            row.learn(chosen, self.options.ngram)
            row.ends = []

    def _read(self, row: _Row, history: Sequence[int]) -> None:
        size = self.options.ngram
        for end in range(max(row.num_read + 1, size), len(history) + 1):
            row.pool.add(history[end - size : end])
        row.num_read = len(history)


def _fill(trie: Trie, row: _Row, limits: Limits) -> tuple[list[int], list[int]]:
    """Add guesses first, since they pay now, then as many whole columns as fit, the nearest first."""
    for guess in row.pool.guesses(trie.tokens[0]):
        trie.add_path(guess, limits)
    columns = (row.column(index) for index in range(len(row.levels[0])))
    ends = [[0, *trie.add_path(column, limits)][-1] if trie.fits(column, limits) else -1 for column in columns]
    order = trie.breadth_first()
    place = {node: index for index, node in enumerate(order)}
    row.ends = [end if end < 0 else place[end] for end in ends]
    return trie.row(order)


def build(parts: Parts) -> Drafter:
    return Lookahead(parts.options)


ROW = MethodRow(
    summary="n-grams from a window of Jacobi iterations that runs ahead of the text",
    paper="Fu et al. 2024, Lookahead Decoding (arXiv 2402.02057)",
    drafter=Lookahead,
    build=build,
    options=LookaheadOptions,
    defaults={"num_draft_tokens": 20, "num_tree_nodes": 128},
)
