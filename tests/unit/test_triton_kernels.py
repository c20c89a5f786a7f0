"""The GPU kernels against plain PyTorch: through Triton's interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.core.tree import TokenTree
from outrider.models.attention.sdpa import SightMaker, attend
from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import KeySplit, Rows, Sights, paths_of
from outrider.models.attention.tree_triton import attend_tree, pack_words, rotate_and_write
from outrider.models.experts import gated
from outrider.models.gpu import small_batch_matmul, tuned
from outrider.models.gpu.gates import gated_rows
from outrider.models.gpu.small_batch_matmul import NormParts, Tile, product, reference_product
from outrider.models.gpu.sums import add_norm
from outrider.models.gpu.tiles import Kind, num_parts, tile_for
from outrider.models.packed import pack


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("num_rows", [1, 5, 17])
@pytest.mark.parametrize("gated", [False, True])
def test_product(num_rows: int, gated: bool) -> None:
    x, weight = rand(num_rows, 96), rand(48, 96, seed=1) / 8
    y = product(x, weight, tile=Tile(bn=32, bk=64, num_stages=2), gated=gated)
    torch.testing.assert_close(y, reference_product(x, weight, gated=gated), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("gated", "num_parts"), [(False, 1), (True, 1), (False, 3)])
def test_products_whose_tiles_the_copy_engine_fetches(gated: bool, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch_matmul, "can_copy", lambda x, weight: True)
    x, weight = rand(5, 96), rand(48, 96, seed=1) / 8
    tile = Tile(bn=16, bk=32, num_stages=2, num_parts=num_parts, copied=True)
    y = product(x, weight, tile=tile, gated=gated)
    y = y.sum(0) if num_parts > 1 else y
    torch.testing.assert_close(y, reference_product(x, weight, gated=gated), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("gated", "num_parts"), [(False, 1), (True, 1), (False, 3)])
def test_products_with_few_bits(bits: int, gated: bool, num_parts: int) -> None:
    x, weight = rand(5, 384), rand(40, 384, seed=1) / 8
    packed = pack(weight, bits)
    assert packed.shape == weight.shape and packed.nbytes < weight.nbytes * bits / 32 * 1.1
    assert float((packed.unpacked() - weight).norm() / weight.norm()) < (0.01 if bits == 8 else 0.15)
    y = product(x, packed, tile=Tile(bn=16, bk=64, num_stages=2, num_parts=num_parts), gated=gated)
    y = y.sum(0) if num_parts > 1 else y
    torch.testing.assert_close(y, reference_product(x, packed.unpacked(), gated=gated), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
def test_sum_and_norm_of_the_parts_of_a_product(num_parts: int) -> None:
    x, weight, residual = rand(5, 96), rand(48, 96, seed=1) / 8, rand(5, 48, seed=2)
    norm, old = NormParts(rand(48, seed=4), 1e-5), residual.clone()
    parts = product(x, weight, tile=Tile(32, 32, num_parts=num_parts)) if num_parts else None
    assert parts is None or parts.shape == ((5, 48) if num_parts == 1 else (num_parts, 5, 48))
    normed = add_norm(residual, parts, norm)
    summed = old + reference_product(x, weight) if num_parts else old
    torch.testing.assert_close(residual, summed, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(normed, torch.rms_norm(summed, (48,), norm.weight, 1e-5), atol=1e-4, rtol=1e-4)


def random_trees(sizes: list[int], seed: int = 0) -> TokenTree:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for size in sizes:
        parents = [-1] + [int(torch.randint(0, n, (), generator=generator)) for n in range(1, size)]
        rows.append(([0] * size, parents))
    return TokenTree.of_rows(rows, DEVICE)


def test_words_hold_the_ancestors() -> None:
    tree = random_trees([70, 3])
    words = pack_words(tree.ancestors)
    assert words.shape == (2, 70, 2)
    for j in (0, 1, 63, 64, 69):
        assert torch.equal((words[:, :, j // 64] >> (j % 64)) & 1, tree.ancestors[:, :, j].long())


CUTS = [KeySplit(1), KeySplit(3, block_keys=16), KeySplit(5, 32, block_keys=16), KeySplit(2, block_queries=32, block_keys=32)]
CUTS += [KeySplit(9, 16, 2, block_keys=16, folds_above=40)]


CASES = [(cut, paged, shape) for cut in CUTS for paged in (False, True) for shape in ("chain", "tree")]


CASES += [(cut, True, "prompt") for cut in (CUTS[1], CUTS[-1])]


@pytest.mark.parametrize(("cut", "paged", "shape"), [*CASES, (KeySplit(2, block_queries=64), False, "wide tree")], ids=str)
def test_attention_is_that_of_the_reference(cut: KeySplit, paged: bool, shape: str) -> None:
    """Queries of a prompt fill several tiles, which do not see the same slots."""
    size = {"chain": 4, "prompt": 12, "tree": 7, "wide tree": 66}[shape]
    is_chain = shape in ("chain", "prompt")
    tree = TokenTree.chain(torch.zeros(2, size, dtype=torch.int64, device=DEVICE)) if is_chain else random_trees([size] * 2)
    lengths, head_dim, capacity = [40, 23], 16, 128
    num_heads, num_kv_heads = (1, 1) if shape == "wide tree" else (4, 2)  # interpreted programs take their time
    num_nodes = tree.num_nodes
    keys, values = rand(3, num_kv_heads, capacity, head_dim), rand(3, num_kv_heads, capacity, head_dim, seed=1)
    queries = rand(2, num_nodes, num_heads, head_dim, seed=2)
    places = [2, 0]
    sight = SightMaker([None], num_heads // num_kv_heads, dtype=torch.float32)(tree, lengths)[None]
    folded = queries.transpose(1, 2).reshape(2, num_kv_heads, -1, head_dim)
    end = max(lengths) + num_nodes
    expected = attend(folded, keys[places][:, :, :end], values[places][:, :, :end], sight=sight, scale=0.25)
    expected = expected.reshape(2, num_heads, num_nodes, head_dim).transpose(1, 2)
    if paged:
        page_len = 16
        order = torch.randperm(24, generator=torch.Generator().manual_seed(5)).to(DEVICE)  # pages anywhere

        def in_pages(memory: torch.Tensor) -> torch.Tensor:
            pages = memory.unflatten(2, (-1, page_len)).transpose(1, 2).flatten(0, 1)
            return torch.empty_like(pages).index_copy(0, order, pages).contiguous()

        keys, values = in_pages(keys), in_pages(values)
        table = order.view(3, 8)[places].int().contiguous()
        rows = Rows(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table, page_len)
    else:
        rows = Rows(*(torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in (lengths, places)))
    for start in (0, 3):
        sights = Sights(None, None, start) if tree.is_chain else sights_of(tree, start)
        seen = attend_tree(queries[:, start:].contiguous(), (keys, values), rows, sights=sights, cut=cut, scale=0.25)
        torch.testing.assert_close(seen, expected[:, start:], atol=1e-4, rtol=1e-4)


def sights_of(tree: TokenTree, start: int) -> Sights:
    words, depths, paths = pack_words(tree.ancestors), tree.depths.int(), paths_of(tree.ancestors)
    words, depths, paths = (tensor[:, start:].contiguous() for tensor in (words, depths, paths))
    return Sights(words, depths, start, paths)


def test_paths_lead_from_the_root_to_the_node() -> None:
    tree = random_trees([9, 9], seed=3)
    paths = paths_of(tree.ancestors)
    for row, node in ((row, node) for row in range(2) for node in range(9)):
        assert paths[row, node, : int(tree.depths[row, node]) + 1].tolist() == [0, *tree.path(row, node)]


def test_in_the_order_of_the_text_a_node_sees_what_plain_decoding_sees() -> None:
    """A node of a tree against the last node of its path as a chain, with its keys where the text will have them. Interpreted
    arithmetic rounds by its own rules; the device's is compared bit by bit in tests/gpu."""
    tree, cut = random_trees([12], seed=1), KeySplit(5, 32, block_keys=16)
    length, head_dim = 27, 16
    memory = rand(1, 2, 128, head_dim), rand(1, 2, 128, head_dim, seed=1)
    queries = rand(1, 12, 4, head_dim, seed=2)
    rows = Rows(*(torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (length, 0)))
    seen = attend_tree(queries, memory, rows, sights=sights_of(tree, 0), cut=cut, scale=0.25)
    for node in range(12):
        path = [0, *tree.path(0, node)]
        moved = memory[0].clone(), memory[1].clone()
        for part, old in zip(moved, memory, strict=True):
            part[:, :, length : length + len(path)] = old[:, :, [length + step for step in path]]
        ends, one = Rows(rows.lengths + len(path) - 1, rows.places), queries[:, node : node + 1].contiguous()
        alone = attend_tree(one, moved, ends, sights=Sights(None, None), cut=cut, scale=0.25)
        torch.testing.assert_close(seen[:, node], alone[:, 0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("chain", [True, False])
def test_rotation_and_write(chain: bool) -> None:
    batch_size, num_nodes, num_heads, num_kv_heads, head_dim, capacity = 2, 3, 4, 2, 8, 32
    qkv = rand(batch_size, num_nodes, (num_heads + 2 * num_kv_heads) * head_dim)
    memory = (
        torch.zeros(3, num_kv_heads, capacity, head_dim, device=DEVICE),
        torch.zeros(3, num_kv_heads, capacity, head_dim, device=DEVICE),
    )
    lengths, places = [5, 0], [1, 2]
    rows = Rows(*(torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in (lengths, places)))
    depths = torch.tensor([[0, 1, 1], [0, 1, 2]], dtype=torch.int32, device=DEVICE)
    tables = rand(capacity, head_dim, seed=3), rand(capacity, head_dim, seed=4)
    bias, q_norm, k_norm = rand(qkv.shape[-1], seed=5), rand(head_dim, seed=6), rand(head_dim, seed=7)
    sights = Sights(None, None if chain else depths)
    queries = rotate_and_write(qkv, memory, rows, sights=sights, tables=tables, bias=bias, norms=(q_norm, k_norm, 1e-6))
    heads = (qkv + bias).view(batch_size, num_nodes, -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 2)
    for row in range(batch_size):
        for node in range(num_nodes):
            position = lengths[row] + (node if chain else int(depths[row, node]))
            cos, sin = tables[0][position], tables[1][position]

            def turned(x: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
                x = torch.rms_norm(x, (head_dim,), norm, 1e-6)
                return x * cos + x.roll(head_dim // 2, -1) * sin

            torch.testing.assert_close(queries[row, node], turned(q[row, node], q_norm), atol=1e-4, rtol=1e-4)
            slot = lengths[row] + node
            torch.testing.assert_close(memory[0][places[row], :, slot], turned(k[row, node], k_norm), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(memory[1][places[row], :, slot], v[row, node], atol=1e-5, rtol=1e-5)
    assert int((memory[0] != 0).any(-1).sum()) == batch_size * num_nodes * num_kv_heads


def test_choices_measured_on_the_device_are_kept_and_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not the number of parts, nor in invariant numerics: results would depend on them."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    tuned.choices.cache_clear()
    try:
        assert tuned.choices() == {}
        tile, cut = Tile(16, 64, num_parts=3), KeySplit(3, block_queries=32)
        sizes = {"num_kv_heads": 2, "capacity": 1100}
        wanted = {
            tuned.tile_key("NARROW", 5, 96, bits=16): asdict(tile),
            tuned.cut_key(1, 8, num_kv_heads=2, capacity=1024): asdict(cut),
        }
        assert tuned.save(wanted).parent.parent == tmp_path
        assert tile_for(Kind.NARROW, 9, 96) == replace(tile, num_parts=num_parts(Kind.NARROW))
        assert replace(tile_for(Kind.NARROW, 9, 96, bits=8), num_parts=3) != tile
        assert cut_for(1, 8, invariant=False, **sizes) == cut
        assert cut_for(1, 8, invariant=True, **sizes).piece_len == 256
        tuned.save({tuned.cut_key(1, 8, num_kv_heads=2, capacity=1024): asdict(replace(cut, side_by_side=True))})
        assert cut_for(1, 8, invariant=False, wide=True, **sizes).side_by_side
        assert not cut_for(1, 8, invariant=False, **sizes).side_by_side  # pages, or a type that kernel does not know
    finally:
        tuned.choices.cache_clear()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "clamped"])
def test_the_gate_of_a_wide_product(activation: str) -> None:
    y = torch.randn(3, 2 * 2100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.allclose(gated_rows(y, activation), gated(activation, *y.chunk(2, -1)), atol=1e-5)
