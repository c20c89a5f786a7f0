"""Latent attention's kernel against plain PyTorch, through Triton's interpreter or on a GPU: chains, trees, pieces, pages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton_interpreter import DEVICE

from outrider.core.tree import TokenTree
from outrider.models.attention.latent_triton import attend_latents
from outrider.models.attention.tree_tiles import KeySplit, Rows, Sights, paths_of
from outrider.models.attention.tree_triton import pack_words
from outrider.models.gpu.latent import by_head

RANK, TURNED, HEADS, SCALE = 32, 16, 3, 0.2
LENGTH = 75
TREE = TokenTree.of_rows([([1, 2, 3], [-1, 0, 0])], DEVICE)
PIECES = KeySplit(5, 16, 3, block_keys=16)
WHOLE = replace(PIECES, num_pieces=1)
FOLDED = replace(PIECES, folds_above=0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def rows_of(length: int) -> Rows:
    lengths, places = torch.tensor([[length], [1]], dtype=torch.int32, device=DEVICE)
    return Rows(lengths, places)


def looked(queries: Tensor, memory: Tensor, rows: Rows, sights: Sights, cut: KeySplit) -> Tensor:
    return attend_latents(queries, memory, rows, sights=sights, cut=cut, scale=SCALE, rank=RANK)


def expected(query: Tensor, keys: Tensor) -> Tensor:
    return torch.softmax(SCALE * query @ keys.T, -1) @ keys[:, :RANK]


def test_a_node_sees_its_own_text_whatever_else_is_in_the_pass() -> None:
    """By its path, in pieces, blocks or whole, and alone behind a longer text: the same bits. By a mask: the same numbers."""
    memory, queries = drawn(2, 1, 80, RANK + TURNED), drawn(1, 3, HEADS, RANK + TURNED)
    depths, words, paths = TREE.depths.int(), pack_words(TREE.ancestors), paths_of(TREE.ancestors)
    found = looked(queries, memory, rows_of(LENGTH), Sights(words, depths, 0, paths), PIECES)
    for cut in (WHOLE, FOLDED):
        assert torch.equal(looked(queries, memory, rows_of(LENGTH), Sights(words, depths, 0, paths), cut), found)
    masked = looked(queries, memory, rows_of(LENGTH), Sights(words, depths), PIECES)
    for node in (0, 2):
        path = [0, *TREE.path(0, node)]
        alone = memory.clone()
        alone[1, 0, LENGTH : LENGTH + len(path)] = memory[1, 0, [LENGTH + step for step in path]]
        one = looked(queries[:, node : node + 1], alone, rows_of(LENGTH + len(path) - 1), Sights(None, None), PIECES)
        assert torch.equal(one[0, 0], found[0, node])
        plain = expected(queries[0, node], alone[1, 0, : LENGTH + len(path)])
        torch.testing.assert_close(found[0, node], plain, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(masked[0, node], plain, atol=1e-5, rtol=1e-4)


def test_pages_hold_what_rows_hold() -> None:
    """More heads than one program has."""
    memory, queries = drawn(1, 1, 80, RANK + TURNED), drawn(1, 1, 18, RANK + TURNED)
    table = torch.tensor([[1, 4, 0, 3, 2]], dtype=torch.int32, device=DEVICE)
    pages = torch.empty(5, 1, 16, RANK + TURNED, device=DEVICE)
    pages[table[0].long()] = memory[0].unflatten(1, (5, 16)).transpose(0, 1)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    length = torch.tensor([LENGTH], dtype=torch.int32, device=DEVICE)
    plain = looked(queries, memory, Rows(length, zero), Sights(None, None), PIECES)
    torch.testing.assert_close(plain[0, 0], expected(queries[0, 0], memory[0, 0, : LENGTH + 1]), atol=1e-5, rtol=1e-4)
    assert torch.equal(looked(queries, pages, Rows(length, table, 16), Sights(None, None), PIECES), plain)


def test_every_head_multiplies_with_its_own_matrix() -> None:
    """Parts are added up first, columns behind a head's inputs are left out, and so are those behind its outputs."""
    parts, weight = drawn(2, 5, 3 * 24 + 7), drawn(3, 40, 20)
    out = torch.zeros(5, 3, 44, device=DEVICE)
    by_head(parts, weight, out, step=24)
    heads = parts.sum(0)[:, : 3 * 24].unflatten(1, (3, 24))[..., :20]
    torch.testing.assert_close(out[..., :40], torch.einsum("mhi,hoi->mho", heads, weight), atol=1e-4, rtol=1e-4)
    assert not out[..., 40:].any()
