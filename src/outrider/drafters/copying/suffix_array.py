"""Sort all positions of a token array by what follows them, by prefix doubling with numpy.

The first key packs as many tokens as fit into 64 bits; each round then sorts by pairs of the last round's ranks, which doubles
the number of tokens compared. It stops at ``depth`` tokens, because look-ups never compare more. A complete order would have to
compare long repeated passages to their ends. Manber & Myers 1993, "Suffix arrays".

    rank_2h(i) = rank of the pair (rank_h(i), rank_h(i + h))
"""

from __future__ import annotations

import numpy as np

_KEY_BITS = 64


def suffix_array(tokens: np.ndarray, *, depth: int) -> np.ndarray:
    """[N] uint32 positions, sorted by at least ``depth`` of the tokens that start there. The end of the text sorts first."""
    size = len(tokens)
    if size == 0:
        return np.zeros(0, np.uint32)
    keys, reach = _first_keys(tokens, depth)
    while True:
        order = np.argsort(keys, kind="stable")
        if reach >= depth:
            return order.astype(np.uint32)
        ranks = _ranks(keys, order)
        if int(ranks[order[-1]]) == size:  # all differ already
            return order.astype(np.uint32)
        keys = _paired(ranks, reach)
        reach *= 2


def _first_keys(tokens: np.ndarray, depth: int) -> tuple[np.ndarray, int]:
    """The first tokens of every suffix packed into one number (0 past the end), and their count."""
    values = tokens.astype(np.uint64) + 1
    bits = max(1, int(values.max()).bit_length())
    reach = min(depth, _KEY_BITS // bits)
    keys = np.zeros(len(values), np.uint64)
    for offset in range(reach):
        keys <<= np.uint64(bits)
        keys[: max(0, len(values) - offset)] |= values[offset:]
    return keys, reach


def _ranks(keys: np.ndarray, order: np.ndarray) -> np.ndarray:
    """[N] uint64, from 1: equal keys have equal ranks."""
    ordered = keys[order]
    new = np.empty(len(order), np.uint64)
    new[0] = 1
    new[1:] = ordered[1:] != ordered[:-1]
    ranks = np.empty_like(new)
    ranks[order] = np.cumsum(new, dtype=np.uint64)
    return ranks


def _paired(ranks: np.ndarray, reach: int) -> np.ndarray:
    keys = ranks << np.uint64(32)
    keys[: max(0, len(ranks) - reach)] |= ranks[reach:]
    return keys
