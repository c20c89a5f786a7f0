"""Attention of many nodes (models/attention/tree_wide.py) against the kernel for few, on a device that has its instructions."""

from __future__ import annotations

import pytest
import torch

from outrider.core.tree import ancestors_of
from outrider.models.gpu.limits import can_go_wide

pytestmark = pytest.mark.skipif(not can_go_wide(128, torch.bfloat16), reason="needs a Hopper GPU and triton 3.6")
HEADS, KV_HEADS, CAPACITY = 8, 2, 2304


SHAPES = [(128, 64, 0, True), (128, 33, 0, False), (128, 70, 0, True), (128, 40, 5, True), (64, 48, 16, False)]


@pytest.mark.parametrize(("head_dim", "num_nodes", "start", "is_tree"), SHAPES)
@pytest.mark.parametrize("lengths", [(1024, 1), (2000, 63), (130, 64), (0, 65)], ids=str)
def test_the_same_numbers_as_the_kernel_for_few(
    head_dim: int, num_nodes: int, start: int, is_tree: bool, lengths: tuple[int, int]
) -> None:
    """To the rounding of weights. What stands behind the nodes is not a number, and must not be read as one."""
    from outrider.models.attention.tree_tiles import KeySplit, Rows, Sights
    from outrider.models.attention.tree_triton import attend_tree, pack_words

    draw = torch.Generator("cuda").manual_seed(num_nodes + lengths[0])
    shape = (3, KV_HEADS, CAPACITY, head_dim)
    memory = tuple(torch.randn(shape, generator=draw, device="cuda").bfloat16() for _ in range(2))
    places = [2, 0]
    for place, length in zip(places, lengths, strict=True):
        for part in memory:
            part[place, :, length + start + num_nodes :] = float("nan")
    queries = torch.randn(2, num_nodes, HEADS, head_dim, generator=draw, device="cuda").bfloat16()
    rows = Rows(*(torch.tensor(values, dtype=torch.int32, device="cuda") for values in (lengths, places)))
    parents = [[-1, *(int(torch.randint(0, n, ())) for n in range(1, start + num_nodes))] for _ in lengths]
    words = pack_words(ancestors_of(torch.tensor(parents)))[:, start:].contiguous().cuda() if is_tree else None
    sights = Sights(words, None, start)
    expected = attend_tree(queries, memory, rows, sights=sights, cut=KeySplit(4, block_queries=64), scale=head_dim**-0.5)
    assert expected.isfinite().all()
    for pieces in (1, 5, 16):
        cut = KeySplit(pieces, shortest=128, block_queries=128, num_stages=4, side_by_side=True)
        seen = attend_tree(queries, memory, rows, sights=sights, cut=cut, scale=head_dim**-0.5)
        torch.testing.assert_close(seen, expected, atol=2e-2, rtol=2e-2)
        again = attend_tree(queries, memory, rows, sights=sights, cut=cut, scale=head_dim**-0.5)
        assert torch.equal(seen, again)
