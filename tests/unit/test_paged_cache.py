"""The paged cache against the contiguous one, whose slots it must hold, and its promises about sharing."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from tiers import repeats

from outrider.cache.page_pool import PagePool
from outrider.cache.paged import PagedCache, as_one
from outrider.cache.slots import LayeredCache
from outrider.core.errors import RequestError
from outrider.core.interfaces import Cache
from outrider.core.tree import TokenTree
from outrider.models.decoder import Decoder
from outrider.models.random_decoder import tiny_config, tiny_weights

CONFIG = tiny_config()
MODEL = Decoder(CONFIG, tiny_weights(CONFIG))


def pool_of(page_len: int = 4, **sizes: int) -> PagePool:
    shape = (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim)
    return PagePool(shape, dtype=torch.float32, device=torch.device("cpu"), page_len=page_len, **sizes)


def tree_for(draw: random.Random, num_rows: int) -> TokenTree:
    rows = []
    for _ in range(num_rows):
        size = draw.randint(1, 6)
        rows.append(([draw.randrange(40) for _ in range(size)], [-1, *(draw.randrange(n) for n in range(1, size))]))
    return TokenTree.of_rows(rows)


def some_path(draw: random.Random, tree: TokenTree, row: int) -> list[int]:
    return [0, *tree.path(row, draw.randrange(tree.sizes[row]))]


def changed(cache: Cache, draw: random.Random) -> Cache:
    """Rows leave, are named twice, are joined to others, or are cut."""
    what, size = draw.randrange(4), cache.batch_size
    if what == 0:
        return cache.fork([draw.randrange(size) for _ in range(draw.randint(1, 3))])
    if what == 1 and size < 4:
        return cache.join(cache.fork([draw.randrange(size)]))
    if what == 2:
        cache.truncate([max(1, length - draw.randrange(5)) for length in cache.lengths])
    return cache


@pytest.mark.parametrize("seed", repeats(3, of=8))
def test_whatever_is_done_to_it_it_scores_as_the_contiguous_cache(seed: int) -> None:
    draw = random.Random(seed)
    pool = pool_of(page_len=draw.choice([1, 3, 4, 16]))
    caches: list[Cache] = [MODEL.new_cache(2), PagedCache.empty(pool, 2)]
    prompts = [[draw.randrange(40) for _ in range(draw.randint(1, 20))] for _ in range(2)]
    for cache in caches:
        MODEL.prefill(prompts, cache)
    for _ in range(12):
        tree = tree_for(draw, caches[0].batch_size)
        paths = [some_path(draw, tree, row) for row in range(tree.batch_size)]
        scores = []
        for cache in caches:
            scores.append(MODEL.score(tree, cache).logits)
            cache.commit(paths)
        for row, size in enumerate(tree.sizes):
            torch.testing.assert_close(scores[0][row, :size], scores[1][row, :size])
        change = draw.randrange(1 << 30)
        caches = [changed(cache, random.Random(change)) for cache in caches]
        assert caches[0].lengths == caches[1].lengths
    del cache, caches
    gc.collect()
    assert pool.num_used == 0


def contents(cache: LayeredCache, row: int) -> torch.Tensor:
    assert isinstance(cache, PagedCache)
    pages = cache.pool.block[:, :, cache.pages[row]]
    return pages.transpose(2, 3).flatten(3, 4)[:, :, :, : cache.lengths[row]].clone()


def test_beginnings_are_shared_until_they_are_written() -> None:
    pool = pool_of()
    first = PagedCache.empty(pool, 1)
    MODEL.prefill([list(range(10))], first)
    run = first.run(0, 10)
    assert pool.num_used == 3 and [pool.uses(page) for page in run.pages] == [2, 2, 2]
    others = PagedCache.of_runs(pool, [run, run.first(8)])
    assert pool.num_used == 3 and others.lengths == [10, 8]
    before = contents(first, 0)
    MODEL.prefill([[7, 7], [5, 5, 5]], others)
    assert others.pages[0][:2] == others.pages[1][:2] == first.pages[0][:2]  # full pages stay shared
    assert len({others.pages[0][2], others.pages[1][2], first.pages[0][2]}) == 3  # the last was copied before it was written
    assert torch.equal(contents(first, 0), before)
    assert torch.equal(contents(others, 0)[:, :, :, :10], before)
    alone = PagedCache.empty(pool_of(), 1)
    MODEL.prefill([[*range(8), 5, 5, 5]], alone)
    torch.testing.assert_close(contents(others, 1), contents(alone, 0))


def test_a_run_outlives_its_row() -> None:
    pool = pool_of()
    cache = PagedCache.empty(pool, 1)
    MODEL.prefill([list(range(9))], cache)
    kept, run = contents(cache, 0), cache.run(0, 9)
    cache.truncate([2])
    MODEL.prefill([[1] * 12], cache)  # the row writes over what it had; the run does not change
    again = PagedCache.of_runs(pool, [run])
    assert torch.equal(contents(again, 0), kept)
    del cache, again
    gc.collect()
    assert pool.num_used == 3
    del run
    gc.collect()
    assert pool.num_used == 0


def test_a_pool_begins_as_small_as_is_asked_for_and_grows_by_half() -> None:
    pool = pool_of(first_pages=1)
    cache = PagedCache.empty(pool, 1)
    MODEL.prefill([[1] * 12], cache)
    assert pool.num_pages == pool.num_used == 3
    MODEL.prefill([[1] * 4], cache)
    assert (pool.num_pages, pool.num_used) == (4, 4)
    MODEL.prefill([[1] * 4], cache)
    assert (pool.num_pages, pool.num_used) == (6, 5)


def test_a_full_pool_says_so_and_goes_on_when_pages_come_back() -> None:
    pool = pool_of(max_pages=4)
    cache = PagedCache.empty(pool, 1)
    MODEL.prefill([[1] * 12], cache)
    assert pool.max_pages == pool.num_used + 1 and pool.page_bytes == pool.block.nbytes // pool.num_pages
    with pytest.raises(RequestError, match="fewer requests"):
        PagedCache.empty(pool, 1).reserve(8)
    cache.truncate([4])
    assert pool.max_pages == pool.num_used + 3
    PagedCache.empty(pool, 1).reserve(8)


def test_caches_are_one_for_a_pass_and_keep_what_it_appends() -> None:
    pool = pool_of()
    caches = [PagedCache.empty(pool, 1) for _ in range(3)]
    for size, cache in enumerate(caches, 3):
        cache.reserve(size)
        cache.commit([range(size)])
    begun = [list(cache.pages[0]) for cache in caches]
    with as_one(caches) as together:
        assert together.lengths == [3, 4, 5]
        together.reserve(6)
        together.commit([range(6), [], range(2)])
    del together
    gc.collect()
    assert [cache.lengths for cache in caches] == [[9], [4], [7]]
    held = [page for cache in caches for page in cache.pages[0]]
    assert len(set(held)) == len(held) == pool.num_used and all(pool.uses(page) == 1 for page in held)
    assert all(cache.pages[0][: len(pages)] == pages for cache, pages in zip(caches, begun, strict=True))
    del cache, caches
    gc.collect()
    assert pool.num_used == 0
