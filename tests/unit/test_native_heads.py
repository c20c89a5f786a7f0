"""Heads without attention whose trees are one native call: the trees of the twin in PyTorch, for random heads of every type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_heads import random_head
from tiny_pair import VOCAB

from outrider import LLM, SamplingParams
from outrider.core.interfaces import Context, Plan
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.hydra import Hydra
from outrider.drafters.heads.l_mtp import LMtp
from outrider.drafters.heads.medusa import Medusa
from outrider.drafters.heads.mlp_speculator import MlpSpeculation
from outrider.drafters.heads.newest import NewestDrafter
from outrider.drafters.heads.redrafter import Redrafter
from outrider.models.heads.frozen import quicken
from outrider.models.native import BUILD

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "medusa": (Medusa, {"num_blocks": 2}),
    "l-mtp": (LMtp, {"draft_vocab_size": 40}),
    "hydra": (Hydra, {"prefix": False}),
    "mlp-speculator": (MlpSpeculation, {}),
    "redrafter": (Redrafter, {}),
}
ROWS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
PLANS = (Plan((4, 2, 3), (7, 9, 5)), Plan((3, 4, 0), (6, 2, 6)), Plan((1, 1, 1), (3, 1, 2)))
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=1, max_tokens=20)
Node = tuple[int, ...]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if BUILD.wait() is None:
        pytest.skip("no C++ compiler")


def drafters(kind: str, dtype: torch.dtype) -> list[NewestDrafter]:
    """The same heads natively and in PyTorch, which has them in float32: the numbers are the same, and nothing is rounded."""
    drafter, changes = KINDS[kind]
    options = HeadOptions(width=3, num_children=4)
    head = random_head(kind, seed=3, **changes).to(dtype)
    ours = drafter(head, options)
    assert ours._native is not None
    twin = drafter(quicken(random_head(kind, seed=3, **changes).to(dtype).float()), options)
    twin._native = None
    return [ours, twin]


def trees(drafter: NewestDrafter, params: SamplingParams) -> list[TokenTree]:
    rows = [RequestState.of(Request(row, params)) for row in ROWS]
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(4)
    [tap] = drafter.taps
    states = [torch.randn(len(row) - 1, 32, generator=generator).bfloat16().float() for row in ROWS]
    state = drafter.start(ROWS, {tap: states})
    noise = Noise(torch.tensor([3, 4, 5]), torch.tensor([0, 7, 2]))
    context = Context(ROWS, Sampler(rows, VOCAB, device), noise, device)
    with torch.inference_mode():
        return [drafter.propose(state, context, plan).tree for plan in PLANS]


def nodes(tree: TokenTree) -> list[set[Node]]:
    """The paths from the root to every node, row by row."""
    found: list[set[Node]] = []
    for row, size in enumerate(tree.sizes):
        paths: list[Node] = []
        for token, parent in zip(tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append(set(paths))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_the_twins(kind: str, dtype: torch.dtype) -> None:
    for params in (GREEDY, SAMPLED):
        for mine, twin in zip(*(trees(drafter, params) for drafter in drafters(kind, dtype)), strict=True):
            assert mine.sizes == twin.sizes
            for row, size in enumerate(mine.sizes):
                assert mine.tokens[row, :size].tolist() == twin.tokens[row, :size].tolist()
                assert mine.parents[row, :size].tolist() == twin.parents[row, :size].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_products_that_round_their_inputs_change_few_nodes(kind: str) -> None:
    """bfloat16: a node whose chance is close to another's may be another, in a tenth of the nodes at most."""
    same = total = 0
    for params in (GREEDY, SAMPLED):
        for mine, twin in zip(*(trees(drafter, params) for drafter in drafters(kind, torch.bfloat16)), strict=True):
            assert mine.sizes == twin.sizes
            for ours, theirs in zip(nodes(mine), nodes(twin), strict=True):
                same, total = same + len(ours & theirs), total + len(theirs)
    assert same >= 0.9 * total


def test_rounded_heads_and_other_devices_stay_with_pytorch() -> None:
    head = random_head("medusa")
    assert Medusa(head, HeadOptions(bits=8))._native is None
    assert Medusa(head.to("meta"))._native is None


def test_the_prefix_of_hydra_reads_natively_and_says_the_same() -> None:
    """The bundled heads have a prefix layer. The text is that of plain decoding, and the twin makes as many passes."""
    llm, params = LLM(dtype="float32"), SamplingParams(max_tokens=24, temperature=0.0)
    plain = llm.generate("Once upon a time", params, method=llm.compose("plain"))[0].token_ids
    counts = []
    for is_native in (True, False):
        method = llm.compose("hydra", num_draft_tokens=3, num_tree_nodes=4)
        drafter = method.drafter
        assert isinstance(drafter, Hydra) and drafter._prefix is not None
        if not is_native:
            drafter._native = drafter._prefix = None
        output = llm.generate("Once upon a time", params, method=method)[0]
        assert output.token_ids == plain
        counts.append(output.stats.num_passes)
    assert counts[0] == counts[1] < len(plain)


def test_requests_of_both_ways_share_the_prefix_memory() -> None:
    """A logits processor takes the twin's levels; its columns are read by the same native layer."""
    llm = LLM(dtype="float32")
    method = llm.compose("hydra", num_draft_tokens=3, num_tree_nodes=4)
    params = [
        SamplingParams(max_tokens=8, temperature=0.0, logits_processors=(lambda tokens, logits: logits,)),
        SamplingParams(max_tokens=16, temperature=0.0),
    ]
    prompts = ["Once upon a time", "Lily and Ben"]
    plain = [llm.generate(prompt, each, method=llm.compose("plain"))[0].token_ids for prompt, each in zip(prompts, params)]
    assert [output.token_ids for output in llm.generate(prompts, params, method=method)] == plain
