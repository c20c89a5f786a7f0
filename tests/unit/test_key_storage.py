"""Keys and values in 8 bits: the rounding law, and the kernels that write and read codes against plain PyTorch."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.cache.page_pool import LayerPages
from outrider.cache.storing import stored_in
from outrider.core.errors import OptionError
from outrider.core.key_storage import FP8, INT8, KeyStorage, storage_named
from outrider.core.tree import TokenTree
from outrider.device.acceptance.coupled import move_path
from outrider.models.attention.sdpa import SightMaker, attend
from outrider.models.attention.tree_tiles import KeySplit, Rows, Sights, paths_of
from outrider.models.attention.tree_triton import attend_tree, pack_words, rotate_and_write
from outrider.models.decoder import Decoder
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.pages import flat_rows, rows_in
from outrider.models.random_decoder import tiny_config, tiny_weights

BOTH = pytest.mark.parametrize("storage", [FP8, INT8], ids=lambda storage: storage.name)
TREE = [-1, 0, 0, 1, 1, 3, 2]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def levels(storage: KeyStorage) -> list[Fraction]:
    """Every code as a number, written from the definition of its format."""
    if storage == INT8:
        return [Fraction(code) for code in range(-127, 128)]
    found = {Fraction(step, 512) for step in range(8)}  # three bits of mantissa below the smallest exponent, -6
    found |= {(1 + Fraction(step, 8)) * Fraction(2) ** power for power in range(-6, 9) for step in range(8)}
    return sorted({sign * one for one in found - {Fraction(480)} for sign in (-1, 1)})  # 480 stands for not-a-number


@BOTH
def test_a_code_is_the_level_nearest_to_the_number(storage: KeyStorage) -> None:
    numbers = torch.cat((rand(3, 32) * 7, torch.zeros(1, 32), rand(1, 32, seed=1) * 1e-5)).bfloat16()
    codes, scales = storage.rounded(numbers)
    known = levels(storage)
    for row, scale, found in zip(numbers.float().tolist(), scales.tolist(), codes.float().tolist(), strict=True):
        largest = max(map(abs, row))
        assert scale == pytest.approx(max(largest, 1e-30) / storage.largest)
        for number, code in zip(row, found, strict=True):
            exact = Fraction(number) / Fraction(scale)
            nearest = min(abs(level - exact) for level in known)
            assert Fraction(code) in known and abs(Fraction(code) - exact) <= nearest + abs(exact) * Fraction(1, 1 << 20)


@BOTH
def test_a_key_is_stored_as_itself_whatever_stands_beside_it(storage: KeyStorage) -> None:
    numbers = rand(4, 2, 16)
    codes, scales = storage.rounded(numbers)
    alone, own = storage.rounded(numbers[2:3, 1:])
    assert torch.equal(codes[2, 1].view(torch.uint8), alone[0, 0].view(torch.uint8)) and torch.equal(scales[2, 1], own[0, 0])
    restored = storage.restored(codes, scales, torch.float32)
    assert float((restored - numbers).norm() / numbers.norm()) < (0.04 if storage == FP8 else 0.01)


def test_an_unknown_storage_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match=r"kv_cache = 'fp9' is not valid.*fp8"):
        storage_named("fp9")


def empty_memory(storage: KeyStorage, dtype: torch.dtype, *shape: int) -> LayerPages:
    codes = [torch.zeros(shape, device=DEVICE).to(storage.codes) for _ in range(2)]
    scales = [torch.zeros(shape[:-1], device=DEVICE) for _ in range(2)]
    return LayerPages(*codes, *scales, dtype)


@BOTH
def test_what_the_kernel_writes_are_the_codes_of_what_it_wrote_before(storage: KeyStorage) -> None:
    """The same keys in 16 bits, rounded afterwards by the law."""
    heads, kv_heads, dim, nodes = 4, 2, 16, 3
    qkv, tables = rand(2, nodes, (heads + 2 * kv_heads) * dim).bfloat16(), (rand(32, dim, seed=1), rand(32, dim, seed=2))
    rows = Rows(*(torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in ([5, 0], [[1, 3], [2, 0]])), 8)
    plain = LayerPages(*(torch.zeros(4, kv_heads, 8, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)))
    coded = empty_memory(storage, torch.bfloat16, 4, kv_heads, 8, dim)
    found = [rotate_and_write(qkv, one, rows, sights=Sights(None, None), tables=tables) for one in (plain, coded)]
    assert torch.equal(*found)
    for numbers, codes, scales in zip(plain[:2], coded[:2], coded[2:4], strict=True):
        written = numbers.abs().amax(-1) > 0
        expected, own = storage.rounded(numbers)
        assert torch.equal(codes.view(torch.uint8)[written], expected.view(torch.uint8)[written])
        assert scales is not None and torch.equal(scales[written], own[written]) and int(written.sum()) == 2 * nodes * kv_heads


@BOTH
@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("cut", [KeySplit(3, block_keys=16), KeySplit(9, 16, 2, block_keys=16, folds_above=40)], ids=str)
def test_attention_over_codes_is_that_over_the_numbers_they_stand_for(
    storage: KeyStorage, is_chain: bool, cut: KeySplit
) -> None:
    num_nodes, lengths, dim, page_len = (4 if is_chain else len(TREE)), [40, 23], 16, 16
    tokens = torch.zeros(2, num_nodes, dtype=torch.int64, device=DEVICE)
    tree = TokenTree.chain(tokens) if is_chain else TokenTree.of_rows([([0] * num_nodes, TREE)] * 2, DEVICE)
    codes, scales = zip(*(storage.rounded(rand(2, 2, 64, dim, seed=seed)) for seed in (0, 1)), strict=True)
    keys, values = (storage.restored(*part, torch.float32) for part in zip(codes, scales, strict=True))
    queries, end = rand(2, num_nodes, 4, dim, seed=2), max(lengths) + num_nodes
    sight = SightMaker([None], 2, dtype=torch.float32)(tree, lengths)[None]
    folded = queries.transpose(1, 2).reshape(2, 2, -1, dim)
    expected = attend(folded, keys[:, :, :end], values[:, :, :end], sight=sight, scale=0.25)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(5)).to(DEVICE)

    def in_pages(part: torch.Tensor) -> torch.Tensor:
        pages = part.unflatten(2, (-1, page_len)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(pages).index_copy(0, order, pages).contiguous()

    memory = LayerPages(*(in_pages(part.view(torch.uint8)).view(storage.codes) for part in codes), *map(in_pages, scales), None)
    rows = Rows(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), order.view(2, 4).int(), page_len)
    sights = (
        Sights(None, None)
        if is_chain
        else Sights(*(pack_words(tree.ancestors), tree.depths.int(), 0, paths_of(tree.ancestors)))
    )
    seen = attend_tree(queries, memory, rows, sights=sights, cut=cut, scale=0.25)
    torch.testing.assert_close(seen, expected.reshape(2, 4, num_nodes, dim).transpose(1, 2), atol=1e-4, rtol=1e-4)


@BOTH
@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_the_fast_decoder_scores_as_the_oracle_does(storage: KeyStorage, numerics: str) -> None:
    """Prompts, chains and trees, before and after a commit that moves nodes."""
    config = tiny_config("llama", head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    weights, prompts = tiny_weights(config, device=str(DEVICE)), [[5, 9, 1, 33, 7, 2, 2, 41, 8], [2, 8, 60]]
    models = [Decoder(config, weights), FastDecoder(config, weights, numerics=numerics, page_len=8)]
    own = Decoder(config, weights)
    for model in models:
        stored_in(model, storage)
    caches = [model.new_cache(2) for model in (*models, own)]
    for model, cache in zip((*models, own), caches, strict=True):
        model.prefill(prompts, cache)
    fast, tree = models[1], TokenTree.of_rows([([3, 4, 5, 6], [-1, 0, 0, 1]), ([9, 8, 1, 2], [-1, 0, 1, 2])], DEVICE)
    assert isinstance(fast, FastDecoder) and fast.traits.kv_cache == storage.name
    for each in (tree, TokenTree.chain(torch.tensor([[3, 4], [9, 8]], device=DEVICE))):
        expected, without = models[0].score(each, caches[0]).logits, own.score(each, caches[2]).logits
        caches[1].reserve(each.num_nodes)
        logits, _ = fast.forward(each.tokens, fast.step_of(each, caches[1]))
        assert float((logits - expected).norm()) < 0.3 * float((expected - without).norm())
        for cache in caches:
            cache.commit([[0, 2], [0, 1]] if each is tree else [[0, 1], [0]])


@BOTH
def test_scales_move_with_their_codes(storage: KeyStorage) -> None:
    """The commit of a captured round against that of the host."""
    config = tiny_config("llama", head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    pools = []
    for on_device in (True, False):
        model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=4)
        stored_in(model, storage)
        cache = model.new_cache(1)
        model.prefill([[5, 9, 1, 33, 7]], cache)
        cache.reserve(6)
        tree = TokenTree.of_rows([([3, 4, 5, 6, 7, 8], [-1, 0, 0, 1, 2, 4])], DEVICE)
        model.forward(tree.tokens, model.step_of(tree, cache))
        if on_device:
            rows = rows_in(flat_rows(cache, 3).to(DEVICE), 1, 4)
            for block in model.pool.blocks:
                move_path(block, rows, torch.tensor([[5, 3, 2, 4, 5]], device=DEVICE))
        cache.commit([[0, 2, 4, 5] if not on_device else [0, 1, 2, 3]])
        pools.append([model.pool.read(layer, side, cache.table().long())[:, :, :9] for layer in range(2) for side in (0, -1)])
    assert all(torch.equal(*pair) for pair in zip(*pools, strict=True))
