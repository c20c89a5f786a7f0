"""Prefill in chunks: ragged rows are cut into chunks, which a model reads one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outrider.core.interfaces import Cache
from outrider.core.tree import TokenTree


def chunks_of(rows: Sequence[Sequence[int]], chunk_len: int, device: torch.device) -> Iterator[TokenTree]:
    """Chains of at most ``chunk_len`` tokens. Finished rows have size 0 and hold only padding."""
    for begin in range(0, max(len(row) for row in rows), chunk_len):
        pieces = [list(row[begin : begin + chunk_len]) for row in rows]
        longest = max(len(piece) for piece in pieces)
        tokens = [[*piece, *[0] * (longest - len(piece))] for piece in pieces]
        yield TokenTree.chain(torch.tensor(tokens, device=device), [len(piece) for piece in pieces])


def read_in_chunks(
    rows: Sequence[Sequence[int]],
    cache: Cache,
    run: Callable[[TokenTree], Mapping[int, Tensor]],
    *,
    chunk_len: int,
    taps: Sequence[int],
    empty: Tensor,
) -> dict[int, list[Tensor]]:
    """Put rows through a model chunk by chunk and commit each; ``run`` makes a pass and returns its taps."""
    pieces: list[tuple[TokenTree, Mapping[int, Tensor]]] = []
    for tree in chunks_of(rows, chunk_len, empty.device):
        tapped = run(tree)
        cache.commit([range(size) for size in tree.sizes])
        pieces.append((tree, tapped))
    return joined_taps(pieces, taps, num_rows=len(rows), empty=empty)


def joined_taps(
    pieces: Sequence[tuple[TokenTree, Mapping[int, Tensor]]], taps: Sequence[int], *, num_rows: int, empty: Tensor
) -> dict[int, list[Tensor]]:
    """States [len, H] of all chunks by tap and row, padding left out; ``empty`` [0, H] for a row without tokens."""

    def of_row(tap: int, row: int) -> Tensor:
        parts = [tapped[tap][row, : tree.sizes[row]] for tree, tapped in pieces]
        return parts[0] if len(parts) == 1 else torch.cat([empty, *parts])

    return {tap: [of_row(tap, row) for row in range(num_rows)] for tap in taps}
