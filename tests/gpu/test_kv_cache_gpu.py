"""Keys and values in FP8 and int8 on a CUDA device: their codes are those of the law, and speculation on them says what plain
decoding on them says, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from invariance import (
    PROMPTS,
    assert_nodes_score_as_their_paths,
    assert_scores_do_not_depend_on_the_pass,
    assert_text_does_not_depend_on_how_prompts_are_cut,
)

from outrider import LLM, SamplingParams
from outrider.cache.page_pool import LayerPages
from outrider.core.key_storage import FP8, STORAGES, KeyStorage
from outrider.core.tree import TokenTree
from outrider.cuda_graphs import captured
from outrider.models.attention.sdpa import SightMaker, attend
from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import Rows, Sights, paths_of
from outrider.models.attention.tree_triton import attend_tree, pack_words, rotate_and_write
from outrider.models.gpu.decoder import FastDecoder

NAMES = ["fp8", "int8"] if torch.cuda.get_device_capability() >= (8, 9) else ["int8"]
PARAMS = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, seed=7)]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("draft-model", {"num_draft_tokens": 3}),
    ("suffix", {"num_draft_tokens": 6}),
    ("early-exit", {"num_draft_tokens": 3}),
    ("draft-tree", {"branching": (3, 2, 1), "num_draft_tokens": 3, "num_tree_nodes": 15}),
    ("best-first", {"num_draft_tokens": 5, "num_tree_nodes": 31}),
    ("eagle3", {"num_draft_tokens": 5, "num_tree_nodes": 31}),
]


@pytest.fixture(scope="module", params=NAMES)
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(device="cuda", numerics="invariant", kv_cache=request.param)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_kernel_writes_the_codes_of_the_law(name: str, dim: int) -> None:
    storage, heads, kv_heads = STORAGES[name], 8, 2
    qkv, tables = torch.randn(2, 40, 12 * dim, device="cuda"), tuple(torch.randn(64, dim, device="cuda") for _ in range(2))
    pages = torch.tensor([[1], [0]], dtype=torch.int32, device="cuda")
    rows = Rows(torch.tensor([5, 0], dtype=torch.int32, device="cuda"), pages, 64)
    shape = (2, kv_heads, 64, dim)
    plain = LayerPages(*(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    zeros = [torch.zeros(shape, device="cuda").to(storage.codes) for _ in range(2)]
    coded = LayerPages(*zeros, *(torch.zeros(shape[:3], device="cuda") for _ in range(2)), torch.bfloat16)
    for memory in (plain, coded):
        queries = rotate_and_write(qkv, memory, rows, sights=Sights(None, None), tables=tables)
        assert queries.shape == (2, 40, heads, dim)
    for numbers, codes, scales in zip(plain[:2], coded[:2], coded[2:4], strict=True):
        written = numbers.abs().amax(-1) > 0
        expected, own = storage.rounded(numbers)
        assert scales is not None and torch.equal(scales[written], own[written])
        assert same(codes[written], expected[written])


def memory_of(storage: KeyStorage, num_pages: int, dim: int) -> tuple[LayerPages, LayerPages]:
    """Random codes in pages, and the numbers they stand for."""
    parts = [storage.rounded(torch.randn(num_pages, 2, 64, dim, device="cuda")) for _ in range(2)]
    codes, scales = zip(*parts, strict=True)
    numbers = [storage.restored(*part, torch.float32) for part in parts]
    return LayerPages(*codes, *scales, torch.bfloat16), LayerPages(*numbers)


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("num_nodes", [1, 7, 40])
@pytest.mark.parametrize("name", NAMES)
def test_attention_over_codes_is_that_over_their_numbers(name: str, num_nodes: int, invariant: bool) -> None:
    draw = torch.Generator().manual_seed(num_nodes)
    parents = [-1, *(int(torch.randint(0, node, (), generator=draw)) for node in range(1, num_nodes))]
    tree = TokenTree.of_rows([([0] * num_nodes, parents)] * 2, torch.device("cuda"))
    lengths, dim = [2100, 333], 128
    memory, numbers = memory_of(STORAGES[name], 80, dim)
    table = torch.randperm(80, device="cuda").view(2, 40).int()
    rows = Rows(torch.tensor(lengths, dtype=torch.int32, device="cuda"), table, 64)
    queries = torch.randn(2, num_nodes, 8, dim, device="cuda").bfloat16()
    cut = cut_for(2, num_nodes * 4, num_kv_heads=2, capacity=2560, invariant=invariant)
    sights = Sights(pack_words(tree.ancestors), tree.depths.int(), 0, paths_of(tree.ancestors))
    seen = attend_tree(queries, memory, rows, sights=sights, cut=cut, scale=dim**-0.5).float()
    sight, end = SightMaker([None], 4, dtype=torch.float32)(tree, lengths)[None], max(lengths) + num_nodes
    keys, values = (part[table.long()].transpose(1, 2).flatten(2, 3)[:, :, :end] for part in numbers[:2])
    folded = queries.float().transpose(1, 2).reshape(2, 2, -1, dim)
    expected = attend(folded, keys, values, sight=sight, scale=dim**-0.5).reshape(2, 8, num_nodes, dim).transpose(1, 2)
    assert float((seen - expected).norm() / expected.norm()) < 8e-3


@pytest.mark.parametrize("length", [60, 250, 300, 1500])
def test_a_node_of_a_tree_scores_as_plain_decoding_of_its_path(llm: LLM, length: int) -> None:
    """Bit for bit: keys of the pass itself are read rounded, like those that were committed before."""
    for num_nodes in (20, 40):
        assert_nodes_score_as_their_paths(llm.target, length, num_nodes=num_nodes, every=6)


@pytest.mark.parametrize("num_nodes", [2, 16, 64])
def test_scores_do_not_depend_on_what_shares_the_pass(llm: LLM, num_nodes: int) -> None:
    assert_scores_do_not_depend_on_the_pass(llm.target, num_nodes)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_speculation_says_what_plain_decoding_says(
    llm: LLM, name: str, options: dict[str, Any], params: SamplingParams
) -> None:
    """Bit for bit, in captured rounds, alone and in a batch; the rounds of the engine say the same."""
    expected = [llm.generate(p, params, method=llm.compose("plain"), trace=True)[0].token_ids for p in PROMPTS]
    method = llm.compose(name, **options)
    assert captured(method, llm.target) is not None
    assert [llm.generate(p, params, method=method)[0].token_ids for p in PROMPTS] == expected
    assert [o.token_ids for o in llm.generate(PROMPTS, params, method=method)] == expected


@pytest.mark.parametrize(("name", "options"), [("plain", {}), METHODS[0], METHODS[4]], ids=["plain", "chains", "trees"])
def test_prompts_read_inside_rounds_say_the_same(llm: LLM, name: str, options: dict[str, Any]) -> None:
    assert_text_does_not_depend_on_how_prompts_are_cut(llm, name, options)


def test_requests_that_outgrow_the_pages_wait_and_say_the_same(llm: LLM) -> None:
    prompts, params = [PROMPTS[number % len(PROMPTS)] for number in range(12)], SamplingParams(max_tokens=120, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(prompts, params, method=llm.compose("plain"))]
    kind = llm.target.traits.kv_cache
    small = LLM(device="cuda", page_len=16, max_batch_size=12, numerics="invariant", kv_cache=kind)
    assert isinstance(small.target, FastDecoder)
    small.target.pool.hold(64)
    for name, options in (("plain", {}), METHODS[0]):
        outputs = small.generate(prompts, params, method=small.compose(name, **options))
        assert [output.token_ids for output in outputs] == expected, name
    assert small.target.pool.num_pages == 64


def test_a_token_takes_about_half_of_the_memory(llm: LLM) -> None:
    own = LLM(device="cuda", numerics="invariant").target
    assert isinstance(own, FastDecoder) and isinstance(llm.target, FastDecoder)
    ratio = own.pool.page_bytes / llm.target.pool.page_bytes
    assert ratio == 2 * own.config.head_dim / (own.config.head_dim + 4)


def test_scores_stay_near_those_of_16_bits(llm: LLM) -> None:
    own, prompt = LLM(device="cuda", numerics="invariant").target, [(place * 37) % 4000 + 5 for place in range(200)]
    chain = TokenTree.chain(torch.tensor([prompt[-8:]], device="cuda"))
    found = []
    for target in (own, llm.target):
        cache = target.new_cache(1)
        target.prefill([prompt], cache)
        found.append(target.score(chain, cache).logits.log_softmax(-1))
    distance = float((found[0].exp() * (found[0] - found[1])).sum(-1).max())
    assert 0 < distance < (0.1 if llm.target.traits.kv_cache == FP8.name else 0.02)
