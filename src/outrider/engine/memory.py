"""Memory is counted before it is used: a budget in bytes, and the largest tree that fits it.

Beside the weights, serving needs memory for the keys and values of committed tokens and of tree nodes, and for the nodes'
logits. All of it is known before a round. So a round that would not fit takes a smaller tree, down to the root alone, which is
plain decoding. A batch that would not fit even then returns its youngest request to the queue; it starts again from its own
tokens when there is room. A request is admitted only if it fits alone, so no admitted request can fail. Bounding the tree by
memory is SpecMemo's idea (arXiv 2506.01986).

    bytes(B, S, T) = B (slots(S + T) k + T v),    slots(n) = 1.5 n in whole blocks of 256       (cache/contiguous.py grows so)
    k: bytes of a token in the caches of target and draft;   v: bytes of a node's logits, twice

If the target's cache is paged, a row takes the pages it fills, and one more that it cannot share:

    bytes(B, S, T) = (sum_b S_b + B (T + 2 P)) k + B T v,      P tokens a page; beginnings that rows share are counted in each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from outrider.core.errors import OptionError, RequestError

_BLOCK = 256
_LARGEST_TREE = 1024


@dataclass(frozen=True)
class BatchSize:
    """Size of a batch, as far as its memory depends on it."""

    num_rows: int
    longest: int
    """Committed tokens of the longest row: rows of a contiguous cache are as long as the longest."""
    num_tokens: int
    """Committed tokens of all rows."""

    def joined(self, other: BatchSize) -> BatchSize:
        longest, num_tokens = max(self.longest, other.longest), self.num_tokens + other.num_tokens
        return BatchSize(self.num_rows + other.num_rows, longest, num_tokens)


@final
@dataclass(frozen=True)
class MemoryModel:
    """Bytes that batches need, against a budget."""

    token_bytes: int
    """Bytes of one token in all caches together."""
    node_bytes: int
    """Bytes of one node's logits, raw and adjusted."""
    budget: int | None = None
    """Most bytes; None for no limit."""
    page_len: int = 0
    """Tokens of a page; 0 where a row is one block."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.token_bytes <= 0:
            raise OptionError("a memory budget needs a model with a known cache size; leave memory_budget out for this one")

    def bytes_of(self, batch: BatchSize, num_nodes: int) -> int:
        """Upper bound on the bytes of a batch in a round of trees of ``num_nodes``, the root included."""
        if batch.num_rows == 0:
            return 0
        if self.page_len:
            slots = batch.num_tokens + batch.num_rows * (num_nodes + 2 * self.page_len)
        else:
            slots = batch.num_rows * (-(-3 * (batch.longest + num_nodes) // (2 * _BLOCK)) * _BLOCK)
        return slots * self.token_bytes + batch.num_rows * num_nodes * self.node_bytes

    def largest_tree(self, batches: Sequence[BatchSize]) -> int | None:
        """Most guesses per row in a round of all batches; None if not even the roots fit."""
        if self.budget is None:
            return _LARGEST_TREE
        if not self._fits(batches, 1):
            return None
        low, high = 0, _LARGEST_TREE
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(batches, middle + 1) else (low, middle - 1)
        return low

    def check(self, num_tokens: int) -> None:
        """Refuse a request that would not fit alone at its full length."""
        needed = self.bytes_of(BatchSize(1, num_tokens, num_tokens), 1)
        if self.budget is not None and needed > self.budget:
            raise RequestError(
                f"the request may grow to {num_tokens} tokens, which take {needed} bytes, and the memory budget is "
                f"{self.budget}; shorten the prompt or max_tokens, or raise the budget"
            )

    def _fits(self, batches: Sequence[BatchSize], num_nodes: int) -> bool:
        assert self.budget is not None
        return sum(self.bytes_of(batch, num_nodes) for batch in batches) <= self.budget
