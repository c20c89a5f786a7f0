"""Wide passes on a CUDA device: products of many rows and folded attention give the bits of narrow ones."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.core.tree import ancestors_of
from outrider.models.attention.tree_tiles import Bounds, KeySplit, Rows, Sights, paths_of
from outrider.models.attention.tree_triton import attend_tree, pack_words
from outrider.models.gpu.finish import Finish
from outrider.models.gpu.limits import can_multiply_wide
from outrider.models.gpu.products import multiply
from outrider.models.gpu.tiles import Kind


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("outputs", [1024, 4096, 6144])
def test_a_row_has_the_same_bits_among_any_number_of_rows(kind: Kind, outputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, 4096, device="cuda").bfloat16() * 0.02
    x = torch.randn(1100, 4096, device="cuda").bfloat16()
    if not can_multiply_wide(x, weight):
        pytest.skip("needs Hopper and a triton with Gluon")
    alone = torch.cat([multiply(x[i : i + 50], weight, kind, exact=True) for i in range(0, 1100, 50)], -2)
    for count in (65, 96, 100, 128, 192, 320, 577, 1100):
        together = multiply(x[:count], weight, kind, exact=True)
        assert torch.equal(together, alone[..., :count, :]), count


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("gated", [False, True])
def test_biases_and_activations_have_the_same_bits_too(activation: str, gated: bool) -> None:
    torch.manual_seed(1)
    weight, x = (torch.randn(count, 1024, device="cuda").half() * 0.1 for count in (1024, 300))
    if not can_multiply_wide(x, weight):
        pytest.skip("needs Hopper and a triton with Gluon")
    finish = Finish(activation, torch.randn(1024, device="cuda").half())
    alone = torch.cat(
        [multiply(x[i : i + 60], weight, Kind.GATED, exact=True, finish=finish, gated=gated) for i in range(0, 300, 60)]
    )
    assert torch.equal(multiply(x, weight, Kind.GATED, exact=True, finish=finish, gated=gated), alone)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("num_nodes", [1, 7, 64])
def test_folding_pieces_changes_no_bit_of_attention(num_nodes: int, window: int, is_tree: bool) -> None:
    torch.manual_seed(num_nodes)
    context = torch.tensor([3000, 1023, 1024, 90, 2047], dtype=torch.int32, device="cuda")
    batch_size, capacity = len(context), 3328
    memory = tuple(torch.randn(batch_size, 2, capacity, 128, device="cuda").bfloat16() for _ in range(2))
    queries = torch.randn(batch_size, num_nodes, 8, 128, device="cuda").bfloat16()
    rows = Rows(context, torch.arange(batch_size, dtype=torch.int32, device="cuda"))
    sights = Sights(None, None)
    if is_tree:
        parents = torch.tensor([[-1, *(max(0, n // 2 - 1) for n in range(1, num_nodes))]] * batch_size)
        ancestors = ancestors_of(parents).cuda()
        depths = (ancestors.sum(-1) - 1).int()
        sights = Sights(pack_words(ancestors), depths, 0, paths_of(ancestors))
    table = torch.randperm(batch_size * capacity // 64, device="cuda").int().view(batch_size, -1)
    pages = tuple(in_pages(part, table) for part in memory)
    places = (memory, rows), (pages, Rows(context, table, 64))
    found = [
        attend_tree(queries, block, where, sights=sights, cut=cut, scale=0.08, bounds=Bounds(window))  # type: ignore
        for block, where in places
        for cut in cuts(64 if num_nodes * 4 <= 128 else 16)
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def cuts(tail_queries: int) -> list[KeySplit]:
    """A program for each piece, folded or not, and programs that share the pieces of a row."""
    sizes = [(14, 0, 1 << 30), (14, 0, 0), (14, 3, 1 << 30), (5, 2, 0), (9, 8, 1500)]
    return [
        KeySplit(pieces, 256, programs, block_queries=64, folds_above=above, tail_queries=tail_queries)
        for pieces, programs, above in sizes
    ]


def in_pages(memory: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[P, H, 64, D] the same keys as [R, H, S, D], in the pages of a table [R, S / 64]."""
    pages = memory.unflatten(2, (-1, 64)).transpose(1, 2).flatten(0, 1)
    return torch.empty_like(pages).index_copy(0, table.flatten().long(), pages).contiguous()
