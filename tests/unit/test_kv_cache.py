"""Caches of 8 bits on a CPU, in the plain PyTorch decoder: speculation says what plain decoding on them says."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from test_native_pages import a_config, a_model, texts

from outrider.cache.page_pool import PagePool
from outrider.cache.paged import PagedCache
from outrider.cache.prefixes import PageStore
from outrider.cache.storing import stored_in
from outrider.core.errors import OptionError
from outrider.core.key_storage import FP8, INT8, KeyStorage
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.job import Job, Slots
from outrider.engine.memory import MemoryModel
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.decoder import Decoder
from outrider.models.random_decoder import tiny_config, tiny_weights

BOTH = pytest.mark.parametrize("storage", [INT8, FP8], ids=["int8", "fp8"])
TREE = TokenTree.of_rows([([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2]), ([6, 7], [-1, 0]), ([8, 9, 10], [-1, 0, 0])])
METHODS = ("draft-model", "draft-tree", "prompt-lookup", "early-exit")


def opened(storage: KeyStorage) -> Decoder:
    return stored_in(Decoder(a_config(), tiny_weights(a_config(), seed=3)), storage)


def pool_of(target: Decoder) -> PagePool:
    assert target.pool is not None
    return target.pool


def a_request(chance: random.Random) -> Request:
    common = list(range(1, 25)) if chance.random() < 0.4 else []
    prompt = [*common, *(chance.randrange(97) for _ in range(chance.randint(1, 90)))]
    params = SamplingParams(max_tokens=chance.randint(4, 20), temperature=chance.choice([0.0, 0.8]), seed=chance.randrange(99))
    return Request(prompt, params)


@BOTH
def test_speculation_says_what_plain_decoding_says(storage: KeyStorage) -> None:
    """Greedy and seeded, chains and trees, in batches that share beginnings, with prompts read beside and little memory."""
    target, chance = opened(storage), random.Random(6)
    pool, draft = pool_of(target), Decoder(a_config(), tiny_weights(a_config(), seed=3, noise=0.3))
    drafts = {"draft-model": draft, "draft-tree": draft}
    methods = {name: compose(name, target, draft=drafts.get(name), policy="fixed") for name in METHODS}
    token_bytes = pool.page_bytes // pool.page_len
    memory = MemoryModel(token_bytes, 0, 1400 * token_bytes, page_len=pool.page_len)
    prefixes = PageStore(pool, 40 * pool.page_bytes)
    scheduler = Scheduler(target, lambda name: methods[str(name)], slots=Slots(6, 32), memory=memory, prefixes=prefixes)
    requests, finished = [a_request(chance) for _ in range(20)], dict[int, list[int]]()
    for number, request in enumerate(requests):
        scheduler.submit(Job(number, RequestState.of(request), METHODS[number % len(METHODS)]))
    while not scheduler.is_idle:
        steps = [step for report in scheduler.round() for step in report.progress()]
        finished |= {step.request: step.state.tokens for step in steps if step.state.is_finished}
    plain = Engine(target, compose("plain", target))
    for number, request in enumerate(requests):
        *_, last = run(plain, [request], max_batch_size=1)
        assert finished[number] == last.state.tokens, number


@BOTH
def test_commits_forks_and_pages_of_any_length_lose_nothing(storage: KeyStorage) -> None:
    """Scales go where codes go."""
    prompts, found = texts(3, 130, 70), []
    for page_len in (1, 16, 64):
        model = stored_in(Decoder(a_config(), tiny_weights(a_config(), seed=3), page_len), storage)
        cache = model.new_cache(3)
        model.prefill(prompts, cache)
        first = model.score(TREE, cache).logits
        cache.commit([[0, 2, 4], [0], [0, 2]])  # nodes move, for page_len = 1 from page to page
        cache = cache.fork([2, 0]).join(cache.fork([1]))
        found.append(torch.cat((first.flatten(), model.score(TREE, cache).logits.flatten())))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-5, rtol=1e-5)


@BOTH
def test_a_token_takes_a_byte_a_number_and_its_scales(storage: KeyStorage) -> None:
    target = opened(storage)
    cache = target.new_cache(1)
    assert isinstance(cache, PagedCache) and target.traits.kv_cache == storage.name
    assert cache.token_bytes == 2 * 2 * (16 + 4)  # layers, sides, a head of 16 and its scale


def test_what_cannot_store_codes_says_why(library: ctypes.CDLL) -> None:
    from outrider import LLM
    from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

    experts = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 2}
    sizes = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    latent = tiny_config("deepseek_v2", **experts, **sizes)
    refused = [
        (Decoder(latent, tiny_weights(latent)), INT8, "a latent stands for the keys and values of all heads"),
        (a_model(library), FP8, "NativeDecoder stores keys in the model's own type alone"),
        (random_recurrent(tiny_raw("mamba2")), INT8, "RecurrentDecoder stores keys in the model's own type alone"),
    ]
    for target, storage, why in refused:
        with pytest.raises(OptionError, match=rf"kv_cache = '{storage.name}' is not available .*{why}"):
            stored_in(target, storage)
        assert target.traits.kv_cache == "auto"
    with pytest.raises(OptionError, match="with tensor_parallel = 2 every rank keeps its keys"):
        LLM(tensor_parallel=2, kv_cache="int8")
    with pytest.raises(OptionError, match="kv_cache = 'int4' is not valid"):
        LLM(kv_cache="int4")


def test_the_option_reaches_the_model_and_no_draft() -> None:
    from outrider import LLM

    llm = LLM(kv_cache="int8", fast=False, dtype="float32", device="cpu", method="draft-model")
    assert llm.target.traits.kv_cache == "int8" and llm.draft is not None and llm.draft.traits.kv_cache == "auto"
