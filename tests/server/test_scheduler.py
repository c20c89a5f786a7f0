"""Every response equals what the same request gets alone, whatever shares its rounds; and afterwards nothing is held."""

from __future__ import annotations

import gc
import random
from collections.abc import Hashable, Sequence
from copy import copy
from functools import cache
from typing import Any

import pytest
import torch

from outrider.cache.contiguous import ContiguousCache
from outrider.cache.paged import PagedCache
from outrider.cache.prefixes import PageStore, PrefixStore
from outrider.core.errors import OptionError, RequestError
from outrider.core.interfaces import Cache
from outrider.core.method import Method
from outrider.core.params import SamplingParams
from outrider.core.reading_target import PromptPiece, ReadingTarget
from outrider.core.report import Progress
from outrider.core.request import Request, RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.grouping import GROUPINGS
from outrider.engine.job import Job, Slots
from outrider.engine.memory import BatchSize, MemoryModel
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.random_decoder import tiny_config, tiny_decoder, tiny_weights

_METHODS = ("draft-model", "prompt-lookup", "plain", "draft-tree", "suffix", "early-exit")
_KAPPA = 2 * 2 * 2 * 8 * 4
"""Bytes of a token in the tiny target's cache: layers, keys and values, heads, head size, float32."""


@cache
def _target() -> Decoder:
    return tiny_decoder(tiny_config(max_position_embeddings=1024))


@cache
def _method(name: Hashable) -> Method:
    draft = tiny_decoder(noise=0.3) if name in ("draft-model", "draft-tree") else None
    return compose(str(name), _target(), draft=draft, policy="adaptive" if name == "draft-model" else "fixed")


def _alone(request: Request) -> RequestState:
    *_, last = run(Engine(_target(), _method("plain")), [request], max_batch_size=1)
    return last.state


def _plain(requests: list[Request]) -> dict[int, RequestState]:
    """Plain decoding in one batch; the first and the last few of them alone."""
    steps = run(Engine(_target(), _method("plain")), requests, max_batch_size=32)
    found = {step.request: step.state for step in steps if step.state.is_finished}
    edge = (*range(4), *range(len(requests) - 4, len(requests)))
    return found | {number: _alone(requests[number]) for number in edge}


def _steps(scheduler: Scheduler) -> list[Progress]:
    return [step for report in scheduler.round() for step in report.progress()]


def _random_request(rng: random.Random) -> Request:
    longest = rng.choice([40, 40, 40, 160])
    common = list(range(1, 25)) if rng.random() < 0.4 else []
    prompt = [*common, *(rng.randrange(64) for _ in range(rng.randint(1, longest)))]
    params = SamplingParams(
        max_tokens=rng.randint(1, 24),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logit_bias={3: -2.0} if rng.random() < 0.2 else {},
        stop_token_ids=(5,) if rng.random() < 0.3 else (),
        logprobs=rng.choice([None, None, 2]),
        seed=rng.randrange(1 << 40),
    )
    return Request(prompt, params)


def _serve(scheduler: Scheduler, requests: list[Request], rng: random.Random) -> tuple[dict[int, RequestState], set[int]]:
    """All requests at random times, some cancelled; those that finished, and those that were given up."""
    finished: dict[int, RequestState] = {}
    cancelled: set[int] = set()
    coming = list(enumerate(requests))
    while coming or not scheduler.is_idle:
        for _ in range(rng.randint(0, 4)):
            if coming:
                number, request = coming.pop(0)
                lane = rng.choice(_METHODS)
                scheduler.check(request, lane)
                scheduler.submit(Job(number, RequestState.of(request, max_draft=rng.choice([None, None, 0, 2])), lane))
        for step in _steps(scheduler):
            if step.state.is_finished:
                finished[step.request] = step.state
        if rng.random() < 0.15:
            number = rng.randrange(len(requests) - len(coming)) if len(requests) > len(coming) else 0
            cancelled.add(number)
            scheduler.cancel(number)
        scheduler.check_integrity()
    return finished, cancelled


class _Reading(Decoder, ReadingTarget):  # type: ignore[misc]
    """A target that is given pieces of prompts with its trees."""

    most_read, num_read = 16, 0

    def score_beside(self, tree: TokenTree, cache: Cache, pieces: Sequence[PromptPiece], *, taps: Sequence[int] = ()) -> Scores:
        for piece in pieces:
            piece.states = self.prefill(piece.rows, piece.cache, taps=piece.taps)
            self.num_read += piece.num_tokens
        return self.score(tree, cache, taps=taps)


def _reading() -> _Reading:
    target = copy(_target())
    target.__class__ = _Reading
    assert isinstance(target, _Reading)
    return target


@pytest.mark.parametrize("reads", [False, True], ids=["apart", "beside"])
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 100), *(pytest.param(seed, 500, marks=pytest.mark.exhaustive) for seed in range(4))]
)
def test_equal_to_alone_under_any_load(seed: int, count: int, reads: bool) -> None:
    """Requests in turns through six methods, with too little memory for all of them, and five at the end that grow
    together until memory holds two. Prompts are read between rounds, or in their passes."""
    rng = random.Random(seed)
    requests = [_random_request(rng) for _ in range(count)]
    budget = 5 * 256 * _KAPPA + 40_000
    memory, prefixes = MemoryModel(_KAPPA, 2 * 4 * 64, budget), PrefixStore(200_000)
    target = _reading() if reads else _target()
    scheduler = Scheduler(target, _method, slots=Slots(8, 48), memory=memory, prefixes=prefixes)
    finished, cancelled = _serve(scheduler, requests, rng)
    assert not isinstance(target, _Reading) or target.num_read > 10 * count
    assert len(finished) > 0.7 * count and set(range(count)) == set(finished) | cancelled
    plain = _plain(requests)
    for number, state in finished.items():
        alone = plain[number]
        assert (state.tokens, state.finish_reason) == (alone.tokens, alone.finish_reason), number
        assert [entry.token for entry in state.logprobs] == [entry.token for entry in alone.logprobs]
        torch.testing.assert_close(
            torch.tensor([e.logprob for e in state.logprobs]),
            torch.tensor([e.logprob for e in alone.logprobs]),
            atol=1e-4,
            rtol=0,
        )
    growing = [Request([n + 1] * 150, SamplingParams(max_tokens=60, seed=n)) for n in range(5)]
    states = [RequestState.of(request) for request in growing]
    for number, state in enumerate(states):
        scheduler.submit(Job(count + number, state, "plain"))
    while not scheduler.is_idle:
        scheduler.round()
    assert [state.tokens for state in states] == [_alone(request).tokens for request in growing]
    assert scheduler.num_preempted > 0
    assert scheduler.is_idle and scheduler.num_running == scheduler.num_waiting == 0
    assert prefixes.num_hits > 0.04 * count and prefixes.num_bytes <= prefixes.budget


@pytest.mark.parametrize("grouping", ["eqspec", "exspec"])
def test_the_reference_groupings_write_the_same_texts(grouping: str) -> None:
    rng = random.Random(3)
    requests = [_random_request(rng) for _ in range(40)]
    scheduler = Scheduler(_target(), _method, slots=Slots(12, 256, grouping), prefixes=PrefixStore(200_000))
    finished, cancelled = _serve(scheduler, requests, rng)
    assert set(range(40)) == set(finished) | cancelled and len(finished) > 25
    plain = _plain(requests)
    for number, state in finished.items():
        assert state.tokens == plain[number].tokens, number


def test_groups_of_equal_lengths_come_first_and_nobody_waits_for_ever() -> None:
    exspec = GROUPINGS["exspec"]
    assert exspec.choose([5, 7, 5, 9, 5], [0] * 5, 6) == [0, 2]
    assert exspec.choose([5, 7, 5, 9, 5], [0] * 5, 12) == [0, 2, 4]
    assert exspec.choose([5, 7, 6], [1, 0, 3], 6) == [2, 0]
    assert exspec.choose([5, 7, 5, 9, 5], [0, 8, 0, 2, 0], 6) == [1, 3]
    assert GROUPINGS["eqspec"].choose([5, 7], [0, 0], 1) == [0, 1]
    with pytest.raises(OptionError, match="did you mean 'exspec'"):
        Scheduler(_target(), _method, slots=Slots(grouping="exspc"))


def test_preempted_requests_lose_nothing() -> None:
    """Rows grow past a block, so the budget that held them does not any more. The most important request never waits again,
    though it came last."""
    rng = random.Random(5)
    requests = [
        Request(
            [rng.randrange(64) for _ in range(150)], SamplingParams(max_tokens=60, temperature=1.0, seed=i, ignore_eos=True)
        )
        for i in range(4)
    ]
    memory = MemoryModel(_KAPPA, 512, 3 * (256 * _KAPPA + 20 * 512))
    scheduler = Scheduler(_target(), _method, slots=Slots(4, 512), memory=memory)
    for number, request in enumerate(requests):
        scheduler.submit(Job(number, RequestState.of(request), "draft-model", priority=int(number < 3)))
    finished: dict[int, RequestState] = {}
    while not scheduler.is_idle:
        finished |= {step.request: step.state for step in _steps(scheduler) if step.state.is_finished}
        held = [lane.batch.cache for lane in scheduler._hosts.values() if lane.batch]
        assert sum(cache.block.nbytes for cache in held if isinstance(cache, ContiguousCache)) <= (memory.budget or 0)
        assert 3 not in scheduler._waiting
    assert scheduler.num_preempted > 0
    for number, request in enumerate(requests):
        assert finished[number].tokens == _alone(request).tokens


def test_important_prompts_are_read_before_others() -> None:
    """Long prompts of little importance leave room for another one, and it overtakes them."""
    scheduler = Scheduler(_target(), _method, slots=Slots(8, 32))
    for number in range(6):
        job = Request([number + 1] * 150, SamplingParams(max_tokens=2, ignore_eos=True))
        scheduler.submit(Job(number, RequestState.of(job), "plain", priority=1))
    scheduler.round()
    late = RequestState.of(Request([9] * 150, SamplingParams(max_tokens=2, ignore_eos=True)))
    scheduler.submit(Job(6, late, "plain"))
    ended = list[int]()
    while not scheduler.is_idle:
        ended += [step.request for step in _steps(scheduler) if step.state.is_finished]
        assert 6 not in scheduler._waiting
    assert ended[0] == 6 and sorted(ended) == list(range(7)), ended


def test_rows_come_and_go_in_one_block() -> None:
    """Without a budget the block of a lane is not copied when a row leaves or another takes its place."""
    rng = random.Random(11)
    requests = [_random_request(rng) for _ in range(40)]
    scheduler = Scheduler(_target(), _method, slots=Slots(8, 256))
    waiting, finished, blocks = list(enumerate(requests)), dict[int, RequestState](), list[int]()
    while waiting or not scheduler.is_idle:
        while waiting and scheduler.num_running + scheduler.num_waiting < 8:
            number, request = waiting.pop(0)
            scheduler.submit(Job(number, RequestState.of(request), "draft-model"))
        finished |= {step.request: step.state for step in _steps(scheduler) if step.state.is_finished}
        scheduler.check_integrity()
        caches = [lane.batch.cache for lane in scheduler._hosts.values() if lane.batch]
        blocks += [cache.store.data_ptr() for cache in caches if isinstance(cache, ContiguousCache)]
    assert len(set(blocks)) < len(requests) / 3
    plain = _plain(requests)
    for number in range(len(requests)):
        assert finished[number].tokens == plain[number].tokens


def test_a_narrowed_cache_holds_the_rows_that_stay() -> None:
    target, prompts = _target(), [[row + 1] * (10 + row) for row in range(6)]
    cache: Any = target.new_cache(6)
    target.prefill(prompts, cache)
    store = cache.store
    cache = cache.narrow([0, 5, 2, 3])
    assert cache.store is store and cache.lengths == [10, 15, 12, 13]
    cache = cache.join(_prefilled([9] * 20))
    assert cache.store is store and cache.lengths == [10, 15, 12, 13, 20]
    for row, prompt in enumerate([prompts[0], prompts[5], prompts[2], prompts[3], [9] * 20]):
        fresh = _prefilled(prompt)
        torch.testing.assert_close(cache.block[:, :, row, :, : len(prompt)], fresh.block[:, :, 0, :, : len(prompt)])
    assert cache.narrow([1, 0]).store is not store  # the order is another, and most rows would be nobody's
    assert cache.narrow([4]).lengths == [20]


def test_cancelled_rows_are_gone_before_the_next_round() -> None:
    scheduler = Scheduler(_target(), _method)
    for number in range(3):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        scheduler.submit(Job(number, RequestState.of(Request([1, 2, number], params)), "plain"))
    assert {step.request for step in _steps(scheduler)} == {0, 1, 2}
    scheduler.cancel(1)
    assert scheduler.num_running == 2
    assert {step.request for step in _steps(scheduler)} == {0, 2}
    scheduler.cancel(1)  # again: it is gone already


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    scheduler = Scheduler(_target(), _method, slots=Slots(4, 64))
    scheduler.submit(Job(0, RequestState.of(Request([1, 2], SamplingParams(max_tokens=50, ignore_eos=True))), "plain"))
    scheduler.round()
    scheduler.submit(Job(1, RequestState.of(Request([3] * 500, SamplingParams(max_tokens=2))), "plain"))
    rounds_before = 0
    while not any(step.request == 1 for step in _steps(scheduler)):
        rounds_before += 1
    assert rounds_before == 500 // 64


def test_trees_shrink_to_the_memory_there_is() -> None:
    memory = MemoryModel(100, 1000, budget=2 * (256 * 100 + 11 * 1000))
    assert memory.largest_tree([BatchSize(2, 100, 150)]) == 10  # 11 nodes, one of them the root
    assert (memory.largest_tree([BatchSize(1, 100, 100)]) or 0) > 10
    assert memory.largest_tree([BatchSize(2, 200, 250)]) is None
    assert (memory.largest_tree([]) or 0) > 0
    for budget in range(60_000, 200_000, 7000):  # the largest that fits: one more would not
        memory, sizes = MemoryModel(100, 1000, budget), [BatchSize(1, 60, 60), BatchSize(2, 90, 130)]
        room = memory.largest_tree(sizes)
        used = [sum(memory.bytes_of(size, nodes) for size in sizes) for nodes in ((room or 0) + 1, (room or 0) + 2)]
        assert (room is None and used[0] > budget) or used[0] <= budget < used[1]


def test_pages_are_counted_by_the_row() -> None:
    whole, paged = MemoryModel(100, 0, 10**6), MemoryModel(100, 0, 10**6, page_len=16)
    ragged = BatchSize(8, 500, 500 + 7 * 20)
    assert paged.bytes_of(ragged, 1) < whole.bytes_of(ragged, 1) / 5
    target = _paged_target()
    cache = target.new_cache(2)
    target.prefill([[1] * 100, [2] * 20], cache)
    cache.truncate(cache.lengths)  # the short row was read beside the long one
    cache.reserve(8)
    assert target.pool is not None
    assert target.pool.num_used * target.pool.page_bytes <= MemoryModel(_KAPPA, 0, 1, 16).bytes_of(BatchSize(2, 100, 120), 8)


@pytest.mark.parametrize("budget", [None, 700 * _KAPPA])
def test_on_pages_texts_are_the_same_and_beginnings_share_memory(budget: int | None) -> None:
    rng, target = random.Random(6), _paged_target()
    pool = target.pool
    assert pool is not None
    prefixes = PageStore(pool, 60 * 16 * _KAPPA)
    methods = {name: compose(name, target, draft=tiny_decoder(noise=0.3)) for name in ("draft-tree", "prompt-lookup")}
    slots, memory = Slots(8, 64), MemoryModel(_KAPPA, 0, budget, page_len=16)
    scheduler = Scheduler(target, lambda name: methods[str(name)], slots=slots, memory=memory, prefixes=prefixes)
    requests = [_random_request(rng) for _ in range(50)]
    finished: dict[int, RequestState] = {}
    for number, request in enumerate(requests):
        scheduler.check(request, "draft-tree")
        scheduler.submit(Job(number, RequestState.of(request), rng.choice(list(methods))))
    while not scheduler.is_idle:
        finished |= {step.request: step.state for step in _steps(scheduler) if step.state.is_finished}
        assert prefixes.num_bytes <= prefixes.budget
    plain = _plain(requests)
    for number in range(len(requests)):
        assert finished[number].tokens == plain[number].tokens, number
    assert prefixes.num_hits > 10
    gc.collect()
    assert 0 < pool.num_used * pool.page_bytes <= prefixes.num_bytes  # nobody but the tree holds a page
    prefixes.clear()
    gc.collect()
    assert pool.num_used == 0


def test_a_lent_beginning_costs_no_page_until_it_is_written() -> None:
    target = _paged_target()
    assert target.pool is not None
    store = PageStore(target.pool, 1 << 20)
    cache = target.new_cache(1)
    target.prefill([list(range(1, 41))], cache)
    store.keep(list(range(1, 41)), cache, 0)
    used = target.pool.num_used
    lent = [store.find([*range(1, 36), 60]) for _ in range(5)]
    assert target.pool.num_used == used and all(one is not None and one.lengths == [35] for one in lent)
    assert lent[0] is not None
    target.prefill([[60, 61]], lent[0])
    assert target.pool.num_used == used + 1  # a copy of the page it writes into
    store.keep([*range(1, 36), 60, 61], lent[0], 0)
    found = store.find([*range(1, 36), 60, 61, 5])
    assert isinstance(found, PagedCache) and found.lengths == [37]
    fresh = _prefilled([*range(1, 36), 60, 61])
    pages = target.pool.block[:, :, found.pages[0]]  # [L, 2, P, Hkv, T, D]
    held = pages.transpose(2, 3).flatten(3, 4)[:, :, :, :37]
    torch.testing.assert_close(held, fresh.block[:, :, 0, :, :37], atol=1e-5, rtol=0)


def test_what_can_never_fit_is_refused_before_it_waits() -> None:
    scheduler = Scheduler(_target(), _method, memory=MemoryModel(_KAPPA, 512, 300 * _KAPPA))
    with pytest.raises(RequestError, match="memory budget"):
        scheduler.check(Request([1] * 200, SamplingParams(max_tokens=50)), "plain")
    with pytest.raises(OptionError, match="unknown method"):
        scheduler.check(Request([1], SamplingParams()), "plane")
    with pytest.raises(OptionError, match="known cache size"):
        MemoryModel(0, 512, 1000)


def test_shared_beginnings_hold_what_a_prefill_would() -> None:
    target, store = _target(), PrefixStore(1 << 20)
    tokens = list(range(1, 41))
    cache = target.new_cache(2)
    target.prefill([tokens, tokens[:30]], cache)
    store.keep(tokens, cache, 0)
    store.keep([*tokens[:20], *range(50, 60)], _prefilled([*tokens[:20], *range(50, 60)]), 0)
    for wanted, known in (([*tokens[:35], 63, 63], 35), ([*tokens[:20], 50, 51, 63], 22), (tokens, 40)):
        found = store.find(wanted)
        assert isinstance(found, ContiguousCache) and found.lengths == [known]
        fresh = _prefilled(wanted[:known])
        torch.testing.assert_close(found.block[..., :known, :], fresh.block[..., :known, :], atol=1e-5, rtol=0)
    assert store.find(list(range(30, 60))) is None


def test_the_store_keeps_to_its_budget() -> None:
    store = PrefixStore(3 * 40 * _KAPPA)
    for first in range(8):
        tokens = [first, *range(1, 40)]
        store.keep(tokens, _prefilled(tokens), 0)
        assert store.num_bytes <= store.budget
    assert store.find([7, *range(1, 40)]) is not None
    assert store.find([0, *range(1, 40)]) is None


def _paged_target() -> Decoder:
    """As ``_target``, on pages of 16 tokens."""
    config = tiny_config(max_position_embeddings=1024)
    return Decoder(config, tiny_weights(config), page_len=16)


def _prefilled(tokens: list[int]) -> Any:
    cache = _target().new_cache(1)
    _target().prefill([tokens], cache)
    return cache


def test_a_full_pool_gets_back_the_beginnings_that_nobody_runs_on() -> None:
    target = _paged_target()
    assert target.pool is not None
    pool, store = target.pool, PageStore(target.pool, 1 << 30)
    pool.hold(16)
    cache = target.new_cache(2)
    target.prefill([list(range(1, 41)), list(range(2, 42))], cache)
    for row in range(2):
        store.keep(list(range(1 + row, 41 + row)), cache, row)
    pages, running = pool.num_pages, cache.fork([1])
    assert isinstance(running, PagedCache)
    del cache
    gc.collect()
    kept = [page for row in running.pages for page in row]
    assert pool.has_room(pool.num_free + 3) and pool.num_pages == pages  # the row that nobody runs on went
    assert not pool.has_room(pages) and all(pool.uses(page) == 1 for page in kept)  # the other stays where it is


def test_a_scheduler_that_is_given_up_holds_no_page_though_somebody_holds_it() -> None:
    target = _paged_target()
    scheduler = Scheduler(target, lambda _: compose("plain", target))
    for number in range(3):
        scheduler.submit(Job(number, RequestState.of(Request([1, 2, 3 + number], SamplingParams(max_tokens=20)))))
    scheduler.round()
    held = target.new_cache(1)
    assert isinstance(held, PagedCache) and held.pool.num_used
    gc.disable()
    try:
        scheduler.give_up()
        assert not held.pool.num_used and scheduler.is_idle
    finally:
        gc.enable()


def test_a_pool_that_may_grow_leaves_beginnings_alone() -> None:
    target = _paged_target()
    assert target.pool is not None
    store, cache = PageStore(target.pool, 1 << 30), target.new_cache(1)
    target.prefill([list(range(1, 41))], cache)
    store.keep(list(range(1, 41)), cache, 0)
    others = target.new_cache(4)
    others.reserve(16 * target.pool.num_pages)
    assert store.find(list(range(1, 41))) is not None
