"""REST: look the last words up in a large corpus on disk, and propose what most often followed them there.

The longest end of the context that occurs in the datastore is found by binary search in a suffix array. The texts that followed
its occurrences are counted into a trie, and the most frequent nodes make the tree. Without a match of at least ``min_match``
tokens nothing is drafted. He et al. 2023, "REST: Retrieval-Based Speculative Decoding", arXiv 2311.08252.

    count(x_1 .. x_d) = occurrences of (context end, x_1 .. x_d);   the tree: the max_nodes largest counts

A node's parent has at least its count and stands before it among equals, so the largest counts always form a tree.
Guesses are retrieved, not sampled: lossless under any rule that is exact for deterministic draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from torch import Tensor

from outrider.core.draft import Shape
from outrider.core.errors import ModelError, OptionError
from outrider.core.interfaces import Drafter, Plan, Stateless
from outrider.core.method_rows import MethodRow, Parts
from outrider.core.tree import TreeRow
from outrider.drafters.copying.copier import Copier
from outrider.drafters.copying.datastore import MAX_CONTINUATION, MAX_MATCH, Datastore
from outrider.drafters.trees.trie import Trie


@dataclass(frozen=True)
class RestOptions:
    """The datastore, and limits of the search."""

    datastore: Datastore | str | None = None
    """Folder of a datastore (see ``outrider datastore build``), or an open one."""
    max_match: int = 16
    """Longest context looked for, in tokens."""
    min_match: int = 2
    """Shortest context that is trusted."""
    max_continuation: int = 10
    """Tokens read after a hit: the depth of the tree."""
    max_hits: int = 512
    """Most hits that are counted. If there are more, evenly spaced ones are taken."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match <= MAX_MATCH:
            raise OptionError(
                f"min_match = {self.min_match} and max_match = {self.max_match} are not valid together; "
                f"use 1 <= min_match <= max_match <= {MAX_MATCH}"
            )
        if not 1 <= self.max_continuation <= MAX_CONTINUATION:
            raise OptionError(f"max_continuation = {self.max_continuation} is not valid; use 1 to {MAX_CONTINUATION}")
        if self.max_hits < 1:
            raise OptionError(f"max_hits = {self.max_hits} is not valid; use at least 1")

    def open_datastore(self) -> Datastore:
        """The datastore these options name."""
        if self.datastore is None or self.datastore == "":
            raise OptionError(
                "method 'rest' needs a datastore; build one with `outrider datastore build` and give datastore=DIR"
            )
        return self.datastore if isinstance(self.datastore, Datastore) else Datastore(self.datastore)


@final
class RestDrafter(Copier):
    """Trees retrieved from a datastore."""

    shape: ClassVar = Shape.TREE

    def __init__(self, options: RestOptions | None = None, *, datastore: Datastore, vocab_size: int) -> None:
        if datastore.max_token >= vocab_size:
            raise ModelError(
                f"datastore {datastore.path} holds token {datastore.max_token} and the model's vocabulary is 0 to "
                f"{vocab_size - 1}; build one with this model's tokenizer"
            )
        self.options = options or RestOptions()
        self.datastore = datastore

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def copied(self, state: Stateless, texts: Sequence[Sequence[int]], plan: Plan) -> list[TreeRow]:
        del state
        plans = zip(texts, plan.max_depth, plan.max_nodes, strict=True)
        return [self._retrieve(history, depth, nodes).row() for history, depth, nodes in plans]

    def _retrieve(self, history: Sequence[int], depth: int, nodes: int) -> Trie:
        options, depth = self.options, min(depth, self.options.max_continuation)
        if depth < 1 or nodes < 1:
            return Trie(history[-1])
        hits = self.datastore.search(
            history,
            min_match=options.min_match,
            max_match=options.max_match,
            length=depth,
            max_hits=options.max_hits,
        )
        trie = Trie(history[-1])
        return trie if hits is None else most_frequent(trie, hits.continuations, nodes)


def most_frequent(trie: Trie, rows: np.ndarray, max_nodes: int) -> Trie:
    """Adds the ``max_nodes`` most frequent prefixes of ``rows`` [H, D], which are sorted; -1 ends a row. Returns the trie."""
    num_rows, depth = rows.shape
    # A trie node at depth d is a run of rows that agree up to column d; it begins where one of those columns changes.
    begins = np.ones((depth, num_rows), bool)
    begins[:, 1:] = np.logical_or.accumulate((rows[1:] != rows[:-1]).T, axis=0)
    begun = np.flatnonzero(begins)  # depth by depth: the next beginning, or the next depth, ends a run
    counts = np.diff(begun, append=depth * num_rows)
    tokens = rows.T.reshape(-1)[begun]
    counts[tokens < 0] = 0
    chosen = np.argsort(-counts, kind="stable")[:max_nodes]  # shallower first among equals: parents before children
    chosen = chosen[counts[chosen] > 0]
    above = np.searchsorted(begun, begun[chosen] - num_rows, side="right") - 1
    place = {-1: 0}
    items = zip(chosen.tolist(), tokens[chosen].tolist(), above.tolist(), counts[chosen].tolist(), strict=True)
    for node, token, parent, count in items:
        place[node] = trie.add(token, place[parent], count / num_rows)
    return trie


def build(parts: Parts) -> Drafter:
    return RestDrafter(parts.options, datastore=parts.options.open_datastore(), vocab_size=parts.target.vocab_size)


ROW = MethodRow(
    summary="a tree of what most often followed in a corpus on disk",
    paper="He et al. 2023, REST (arXiv 2311.08252)",
    drafter=RestDrafter,
    build=build,
    options=RestOptions,
    defaults={"num_draft_tokens": 10, "num_tree_nodes": 32},
    needs=("datastore",),
)
