"""How the keys of a pass are cut into pieces, one to a program."""

from __future__ import annotations

from dataclasses import replace

from outrider.models.attention.tree_tiles import BLOCK, KeySplit
from outrider.models.gpu.tuned import choices, cut_key

_ENOUGH = 128
"""Programs that keep the device busy."""
_ENOUGH_FOR_LATENTS = 64
"""Programs that keep the device busy if each may read a whole text. Partial results take memory that grows with heads, nodes
and pieces."""
HEADS_OF_A_TILE = 16
"""Query heads of one node in a program of latent attention."""


def cut_for(
    batch_size: int, num_queries: int, *, num_kv_heads: int, capacity: int, invariant: bool, wide: bool = False
) -> KeySplit:
    """The cut that was fastest on an H200. ``num_queries`` is nodes times query heads per key head. ``wide``: the kernel for
    many queries is available (``limits.can_go_wide``)."""
    if invariant:
        tail = 64 if num_queries <= 128 else 16
        # blocks of a row that keep the device busy: shorter rows are cut into pieces
        num_blocks = -(-_ENOUGH // (batch_size * num_kv_heads * -(-num_queries // 64)))
        folds_above = (num_blocks - 1) * 256 * BLOCK
        num_pieces = max(-(-min(capacity, folds_above) // 256), -(-capacity // (256 * BLOCK)) + 1)
        num_programs = min(num_pieces, num_blocks * BLOCK)
        # one tile: sums depend on how it is laid out
        return KeySplit(num_pieces, 256, num_programs, block_queries=64, folds_above=folds_above, tail_queries=tail)
    tuned = choices().get(cut_key(batch_size, num_queries, num_kv_heads=num_kv_heads, capacity=capacity))
    if tuned is not None and (wide or not tuned.get("side_by_side")):
        return KeySplit(**tuned)
    wide = wide and num_queries >= 96 and capacity >= 4096  # it takes longer to begin
    block = 16 if num_queries <= 16 else 32 if num_queries <= 32 else 128 if wide else 64
    num_programs = batch_size * num_kv_heads * -(-num_queries // block)
    # programs of the device's processors, of which large ones hold fewer, and one where a piece is short
    most = 528 if block < 64 else 264 if not wide and capacity >= 4096 else 132
    num_pieces = max(1, min(16, capacity // 128, most // num_programs))
    if wide:
        return KeySplit(num_pieces, shortest=128, block_queries=block, block_keys=64, num_stages=4, side_by_side=True)
    return KeySplit(num_pieces, shortest=128, block_queries=block, block_keys=128 if block == 16 else 64)


def latent_cut(shape: tuple[int, int], num_heads: int, *, capacity: int) -> KeySplit:
    """The cut of latent attention, for rows that end at ``capacity`` or before. If there are enough programs, each reads the
    whole text of its node, and there is one result. Otherwise several programs share the pieces. The bits are the same."""
    num_programs = shape[0] * shape[1] * -(-num_heads // HEADS_OF_A_TILE)
    num_blocks = -(-_ENOUGH // num_programs)
    folds_above = (num_blocks - 1) * 256 * BLOCK
    num_pieces = max(-(-min(capacity, folds_above) // 256), -(-capacity // (256 * BLOCK)))
    cut = KeySplit(num_pieces, 256, min(num_pieces, num_blocks * BLOCK), num_warps=8, folds_above=folds_above)
    return replace(cut, num_pieces=1) if num_programs >= _ENOUGH_FOR_LATENTS else cut
