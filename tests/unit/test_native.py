"""The native CPU pass: bit-identical scores whatever shares the pass, guesses in one call, building and falling back.

That its numbers are right is shown in test_decoder_families.py, against transformers.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import accumulate, product
from operator import mul
from typing import Any

import pytest
import torch
from fresh import run_fresh

from outrider import LLM, SamplingParams
from outrider.bundled import bundled_path
from outrider.core.draft import Resume
from outrider.core.interfaces import Cache, Context, Doubt, Plan
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise, Purpose, gumbel_stream, make_key
from outrider.core.route import Route
from outrider.core.sampling import Sampler
from outrider.core.tempering import Cut, Tempering
from outrider.core.tree import TokenTree
from outrider.core.truncation import min_p, top_k, top_p
from outrider.drafters.model.best_first import BestFirst, BestFirstOptions
from outrider.models.config import ModelConfig, config_of
from outrider.models.decoder import Decoder
from outrider.models.load import load_model
from outrider.models.native import NativeDecoder, can_run
from outrider.models.native.compiler import find_compiler
from outrider.models.native.instruction_sets import isa_here
from outrider.models.native.packed_model import PackedModel
from outrider.models.packed import pack
from outrider.models.random_decoder import tiny_weights
from outrider.models.weights import Weights

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KINDS = {
    "heads of 32": {"model_type": "llama", "head_dim": 32},
    "heads of 16": {"model_type": "llama", "head_dim": 16},
    "heads of 96": {"model_type": "llama", "head_dim": 96, "num_attention_heads": 8, "num_key_value_heads": 2},
    "heads of 20": {"model_type": "llama", "head_dim": 20, "attention_bias": True},
    "windows": {"model_type": "mistral", "sliding_window": 40, "head_dim": 32},
    "gemma": {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24},
    "norms over all heads": {"model_type": "olmo2", "head_dim": 16},
    "parallel layers": {"model_type": "stablelm", "use_parallel_residual": True, "qk_layernorm": True},
    "no gate": {"model_type": "gpt_neox", "num_key_value_heads": 6},
    "experts": {
        **{"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 10, "num_experts_per_tok": 3},
        **{"moe_intermediate_size": 40, "mlp_only_layers": [1]},
    },
    "experts and sinks": {
        **{"model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 7, "num_experts_per_tok": 2},
        "sliding_window": 24,
    },
    "latents": {
        **{"model_type": "deepseek_v3", "kv_lora_rank": 40, "q_lora_rank": 24, "qk_nope_head_dim": 20},
        **{"qk_rope_head_dim": 24, "v_head_dim": 18, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        **{"moe_intermediate_size": 24, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "num_key_value_heads": 6},
    },
}
DTYPES = [torch.float32, torch.bfloat16]


def in_turn(turn: int) -> list[Any]:
    """Every kind; ``make test`` takes every second one, from number ``turn`` on. Two tests that take turns see all."""
    return [pytest.param(kind, marks=() if place % 2 == turn else pytest.mark.exhaustive) for place, kind in enumerate(KINDS)]


def kinds_and_dtypes() -> list[Any]:
    """Every kind with every type; ``make test`` takes one type a kind, in turn."""
    pairs = [(kind, dtype, (place + turn) % 2) for place, kind in enumerate(KINDS) for turn, dtype in enumerate(DTYPES)]
    return [
        pytest.param(kind, dtype, id=f"{kind}-{dtype}", marks=pytest.mark.exhaustive if other else ())
        for kind, dtype, other in pairs
    ]


def config_named(kind: str) -> ModelConfig:
    config = config_of({**SIZES, **KINDS[kind]})
    assert config is not None
    return config


def settled(config: ModelConfig) -> ModelConfig:
    """The same model with all experts chosen: rounding moves no choice."""
    if config.experts is None:
        return config
    return replace(config, experts=replace(config.experts, num_chosen=config.experts.count, groups=1, chosen_groups=1))


def random_weights(config: ModelConfig, *, dtype: torch.dtype, seed: int) -> Weights:
    """The same weights in any type; norms keep theirs where they are stored wider."""
    weights = tiny_weights(config, seed=seed)

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    layers = [replace(layer, **{name: cast(tensor) for name, tensor in vars(layer).items()}) for layer in weights.layers]
    embedding = weights.embedding.to(dtype)
    head = embedding if weights.head is weights.embedding else weights.head.to(dtype)
    return Weights(embedding, layers, weights.norm.to(dtype), head, cast(weights.norm_bias))


def random_tree(chance: random.Random, num_nodes: int) -> tuple[list[int], list[int]]:
    parents = [-1, *(chance.randrange(max(0, node - 4), node) for node in range(1, num_nodes))]
    return [chance.randrange(VOCAB) for _ in range(num_nodes)], sorted(parents)


@pytest.mark.parametrize(("kind", "dtype"), kinds_and_dtypes())
def test_scores_do_not_depend_on_what_shares_the_pass(library, kind: str, dtype: torch.dtype) -> None:
    """Bit for bit: a node of a tree in a ragged batch has the logits of its path fed token by token, alone."""
    config, chance = config_named(kind), random.Random(1)
    model = NativeDecoder(library, config, random_weights(config, dtype=dtype, seed=2))
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (3, 61, 130)]
    trees = [random_tree(chance, size) for size in (20, 7, 33)]
    tree, batch = TokenTree.of_rows(trees), model.new_cache(3)
    model.prefill(prompts, batch)
    logits = model.score(tree, batch).logits
    for row, (tokens, _) in enumerate(trees):
        alone = model.new_cache(1)

        def fed(texts: list[int], alone: Cache = alone) -> torch.Tensor:
            for token in texts:
                found = model.score(TokenTree.chain(torch.tensor([[token]])), alone).logits[0, 0]
                alone.commit([[0]])
            return found

        fed(prompts[row])
        for node in (0, tree.sizes[row] // 2, tree.sizes[row] - 1):
            alone.truncate([len(prompts[row])])
            found = fed([tokens[0], *(tokens[n] for n in tree.path(row, node))])
            assert torch.equal(found, logits[row, node]), f"row {row}, node {node}"


@pytest.mark.parametrize("bits", [16, 8])
def test_scores_do_not_depend_on_how_many_share_the_pass(library, bits: int) -> None:
    """Rows are multiplied in groups whose shape depends on their number; every shape gives the same bits."""
    config, chance = config_named("heads of 32"), random.Random(3)
    model = NativeDecoder(library, config, random_weights(config, dtype=torch.bfloat16, seed=2), bits)
    tokens, cache = [chance.randrange(VOCAB) for _ in range(130)], model.new_cache(1)
    one_by_one = []
    for token in tokens:
        one_by_one.append(model.score(TokenTree.chain(torch.tensor([[token]])), cache).logits[0])
        cache.commit([[0]])
    for width in (2, 15, 16, 17, 32, 33, 47, 48, 49, 64, 65, 113, 130):
        logits = model.score(TokenTree.chain(torch.tensor([tokens[:width]])), model.new_cache(1)).logits[0]
        assert torch.equal(logits, torch.cat(one_by_one[:width])), f"{width} rows"


@pytest.mark.parametrize("kind", ["heads of 20", "windows", "gemma", "no gate", "experts", "latents"])
def test_float16_has_the_bits_of_the_same_weights_in_float32(library, kind: str) -> None:
    config = config_named(kind)
    narrow = random_weights(config, dtype=torch.float16, seed=3)
    wide = random_weights(config, dtype=torch.float16, seed=3)
    layers = [replace(layer, **{n: t if t is None else t.float() for n, t in vars(layer).items()}) for layer in wide.layers]
    wide = Weights(wide.embedding.float(), layers, wide.norm.float(), wide.head.float(), norm_bias=wide.norm_bias)
    rows, tree = [[3, 1, 4, 1, 5], [9, 2]], TokenTree.of_rows([([5, 6, 7, 8], [-1, 0, 0, 1])] * 2)
    logits = []
    for weights in (narrow, wide):
        model = NativeDecoder(library, config, weights)
        assert model.dtype == torch.float32 and model.embed(tree.tokens).dtype == torch.float32
        cache = model.new_cache(2)
        model.prefill(rows, cache)
        logits.append(model.score(tree, cache).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", in_turn(0))
def test_bfloat16_is_near_the_twin(library, kind: str) -> None:
    config = settled(config_named(kind))
    weights = random_weights(config, dtype=torch.bfloat16, seed=4)
    exact = Decoder(config, random_weights(config, dtype=torch.float32, seed=4))
    rows = [[(7 * i + 3 * row) % VOCAB for i in range(70 + row)] for row in range(2)]
    tree = TokenTree.of_rows([([5, 6, 7, 8], [-1, 0, 0, 1])] * 2)
    logits = []
    for model in (exact, Decoder(config, weights), NativeDecoder(library, config, weights)):
        cache = model.new_cache(2)
        model.prefill(rows, cache)
        logits.append(model.score(tree, cache).logits.float())
    eager, native = ((other - logits[0]).norm() / logits[0].norm() for other in logits[1:])
    assert native < 0.05
    assert native < 1.2 * eager, "float32 between the matrices may not be worse than bfloat16"


def rounded_weights(weights: Weights) -> Weights:
    """What the model of 8 bits stands for, in float32."""

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        if matrix.dim() == 3:
            return torch.stack([rounded(one) for one in matrix])
        packed = pack(matrix, 8)
        return packed.integers().float() * packed.scales[0].float()[:, None]

    def wide(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        matrices = ("qkv", "out", "gate_up", "down", "query_up", "shared_gate_up", "shared_down")
        return None if tensor is None else rounded(tensor) if name in matrices else tensor.float()

    layers = [replace(layer, **{name: wide(name, value) for name, value in vars(layer).items()}) for layer in weights.layers]
    bias = None if weights.norm_bias is None else weights.norm_bias.float()
    return Weights(weights.embedding.float(), layers, weights.norm.float(), rounded(weights.head), bias)


@pytest.mark.parametrize("kind", in_turn(1))
def test_eight_bits_are_the_rounded_model(library, kind: str) -> None:
    """Natively and through PyTorch's own product of bfloat16 and int8: no further from it than bfloat16 is from float32.
    Experts are rounded natively alone."""
    config = settled(config_named(kind))
    weights = random_weights(config, dtype=torch.bfloat16, seed=4)
    exact = Decoder(config, rounded_weights(weights))
    tree, logits = TokenTree.of_rows([([5, 6, 7, 8], [-1, 0, 0, 1])]), list[torch.Tensor]()
    for model in (
        exact,
        Decoder(config, weights, bits=8),
        NativeDecoder(library, config, weights, 8),
        Decoder(config, weights),
    ):
        cache = model.new_cache(1)
        model.prefill([[(7 * i) % VOCAB for i in range(70)]], cache)
        logits.append(model.score(tree, cache).logits.float())
    eager, native, unrounded = ((other - logits[0]).norm() / logits[0].norm() for other in logits[1:])
    assert eager < 0.05
    assert native < 1.2 * eager
    assert native < unrounded, "nearer to the rounded model than the model of 16 bits is"


def test_text_of_eight_bits_is_that_of_its_plain_decoding(library) -> None:
    llm = LLM(dtype="int8")
    params, prompts = SamplingParams(max_tokens=40), ["Once upon a time", "The old man looked at the sea and"]
    texts = [
        [output.token_ids for output in llm.generate(prompts, params, method=llm.compose(name))]
        for name in ("plain", "draft-model", "best-first")
    ]
    assert texts[1] == texts[0] and texts[2] == texts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_routes_and_resumed_passes_are_the_twins(library, kind: str) -> None:
    config = config_named(kind)
    weights = random_weights(config, dtype=torch.float32, seed=5)
    models = Decoder(config, weights), NativeDecoder(library, config, weights)
    rows, tree = [[3, 1, 4, 1, 5], [9, 2]], TokenTree.of_rows([([5, 6, 7, 8], [-1, 0, 0, 1])] * 2)
    route = Route.without(3, attention=[1], mlp=[0, 2])
    exits, scores, later = [], [], []
    for model in models:
        cache = model.new_cache(2)
        model.prefill(rows, cache)
        exits.append(model.exit(tree, cache, route=route))
        first = TokenTree.of_rows([([5, 6], [-1, 0])] * 2)
        hidden = model.exit(first, cache, route=Route.first(2, 3))
        later.append(model.exit(first, cache, route=Route.first(3, 3), begun=Resume(2, hidden)))
        scores.append(model.score(tree, cache, resume=Resume(2, hidden), taps=(3,)))
        torch.testing.assert_close(model.logits(scores[-1].taps[3]), scores[-1].logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(*exits, atol=1e-4, rtol=0)
    torch.testing.assert_close(*later, atol=1e-4, rtol=0)
    torch.testing.assert_close(scores[0].logits, scores[1].logits, atol=1e-4, rtol=0)
    plain = models[1].new_cache(2)
    models[1].prefill(rows, plain)
    assert torch.equal(models[1].score(tree, plain).logits, scores[1].logits), "a resumed pass is the pass, bit for bit"


def _lengths(depths: list[int], doubt: Doubt | None = None) -> Plan:
    return Plan(tuple(depths), tuple(depths), doubt=doubt)


def _ends(beliefs: list[list[float]], most: list[int], doubt: Doubt) -> list[int]:
    """Guesses of each row, by the two sentences of ``Doubt``."""
    hopes = [list(accumulate((min(1.0, t * belief) for belief in row), mul)) for row, t in zip(beliefs, doubt.trust)]
    depths, (levels, places) = list(most), doubt.prices(max(most) + 1)
    for step in range(max(most)):
        alive = [row for row, depth in enumerate(depths) if depth > step]
        for row in alive:
            if hopes[row][step] < places[step]:
                depths[row] = step
        going = [row for row in alive if depths[row] > step + 1]
        if sum(hopes[row][step] for row in going) < levels[step + 1] + places[step + 1] * len(going):
            for row in going:
                depths[row] = step + 1
    return depths


def test_a_chain_ends_where_it_is_doubted(library) -> None:
    """Beliefs are shares of the ranking's softmax, cuts included; drafts end where ``Doubt`` says."""
    config = config_named("heads of 32")
    model = NativeDecoder(library, config, random_weights(config, dtype=torch.float32, seed=6))
    rows, temperatures, trust = [[3, 1, 4], [9], [2, 6], [5]], [0.0, 0.8, 1.0, 1.3], (1.0, 0.9, 2.0, 1.0)
    cuts, most = [Cut(), Cut(), Cut(top_k=5), Cut(top_p=0.5)], [6, 6, 6, 0]
    noise = Noise(torch.tensor([11, 12, 13, 14]), torch.tensor([4, 0, 9, 2]))
    tempering = Tempering(temperatures, cuts)
    free = model.guess(rows, model.new_cache(4), plan=_lengths(most), tempering=tempering, noise=noise)
    assert free.beliefs is None and list(free.depths) == most
    expected: list[list[float]] = [[] for _ in rows]
    for row, step in product(range(3), range(6)):
        text = torch.tensor([[*rows[row], *free.tokens[row, :step].tolist()]])
        logits = model.score(TokenTree.chain(text), model.new_cache(1)).logits[0, -1]
        gumbel = noise.target_gumbel(torch.full((4, 1), step), VOCAB)[row, 0]
        law = top_k(logits[None, None], torch.tensor([[[min(cuts[row].top_k or VOCAB, VOCAB)]]]))
        ranks = law[0, 0] + temperatures[row] * gumbel
        expected[row].append(ranks.softmax(-1)[free.tokens[row, step]].item())
    seen = set()
    every_levels = (0.0,), (0.03, 0.9, 0.03), (0.3,), (0.9,), (3.0,)
    every_places = (0.0,), (0.01,), (0.0, 0.01, 0.1), (0.5,)
    for levels, places in product(every_levels, every_places):
        cache, doubt = model.new_cache(4), Doubt(levels, places, trust)
        tokens, depths, beliefs = model.guess(rows, cache, plan=_lengths(most, doubt), tempering=tempering, noise=noise)
        assert list(depths) == _ends(expected, most, doubt)
        assert cache.lengths == [len(row) + max(0, depth - 1) for row, depth in zip(rows, depths)]
        assert beliefs is not None
        for row, depth in enumerate(depths):
            assert tokens[row, :depth].tolist() == free.tokens[row, :depth].tolist()
            assert beliefs[row] == pytest.approx(expected[row][:depth], rel=1e-4)
        seen.add(tuple(depths))
    assert len(seen) >= 5 and any(0 in depths[:3] for depths in seen), "both prices decide"


def test_guesses_are_those_made_one_by_one(library) -> None:
    config = config_named("heads of 32")
    model = NativeDecoder(library, config, random_weights(config, dtype=torch.float32, seed=6))
    rows, depths, temperatures = [[3, 1, 4], [9], [2, 6]], [5, 3, 0], [0.0, 0.8, 1.0]
    noise = Noise(torch.tensor([11, 12, 13]), torch.tensor([4, 0, 9]))
    cache = model.new_cache(3)
    guesses = model.guess(rows, cache, plan=_lengths(depths), tempering=Tempering(temperatures), noise=noise).tokens
    assert cache.lengths == [7, 3, 2]
    for row, depth in enumerate(depths):
        text = list(rows[row])
        for step in range(depth):
            logits = model.score(TokenTree.chain(torch.tensor([text])), model.new_cache(1)).logits[0, -1]
            gumbel = noise.target_gumbel(torch.full((3, 1), step), VOCAB)[row, 0]
            ranked = logits if temperatures[row] == 0 else logits / temperatures[row] + gumbel
            text.append(int(ranked.argmax()))
        assert guesses[row, :depth].tolist() == text[len(rows[row]) :]


CUTS = [Cut(top_k=5), Cut(top_p=0.7), Cut(min_p=0.1), Cut(top_k=20, top_p=0.8, min_p=0.02), Cut(top_k=1000, top_p=0.9999)]


def test_guesses_are_cut_as_the_core_cuts(library) -> None:
    config = config_named("heads of 32")
    model = NativeDecoder(library, config, random_weights(config, dtype=torch.float32, seed=6))
    rows, temperatures = [[3, 1, 4]] * len(CUTS), [0.9] * len(CUTS)
    noise = Noise(torch.arange(len(CUTS)), torch.zeros(len(CUTS), dtype=torch.int64))
    tempering = Tempering(temperatures, CUTS)
    plan = _lengths([12] * len(CUTS))
    guesses = model.guess(rows, model.new_cache(len(CUTS)), plan=plan, tempering=tempering, noise=noise).tokens
    gumbel = noise.target_gumbel(torch.arange(12).expand(len(CUTS), -1), VOCAB)
    num_kept = []
    for row, cut in enumerate(CUTS):
        text = torch.tensor([[*rows[row], *guesses[row].tolist()]])
        law = model.score(TokenTree.chain(text), model.new_cache(1)).logits[:, 2:-1] / temperatures[row]
        law = top_k(law, torch.tensor([[[min(cut.top_k or VOCAB, VOCAB)]]]))
        law = min_p(top_p(law, torch.tensor([[[cut.top_p]]])), torch.tensor([[[cut.min_p]]]))
        num_kept.append(law.isfinite().sum(-1).float().mean().item())
        assert guesses[row].tolist() == (law[0] + gumbel[row]).argmax(-1).tolist()
    assert num_kept[0] == 5 and all(1 < kept < VOCAB for kept in num_kept[:4]), num_kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_that_of_plain_decoding_in_every_type(library, dtype: str, temperature: float) -> None:
    """What rounding forbids elsewhere: wide trees in bfloat16 give the text of plain decoding, token for token."""
    llm = LLM(dtype=dtype)
    assert isinstance(llm.target, NativeDecoder)
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=3)
    prompts = ["Once upon a time", "The old man looked at the sea and"]
    texts = [
        [output.token_ids for output in llm.generate(prompts, params, method=llm.compose(name))]
        for name in ("plain", "draft-model", "best-first", "token-recycling", "lookahead")
    ]
    assert all(other == texts[0] for other in texts[1:])


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.8, 0), (0.8, 40)])
def test_trees_in_one_call_are_those_grown_level_by_level(library, temperature: float, top_k: int) -> None:
    """A ragged batch, plans of different depth and size; and the cache is left as the twin leaves it."""
    config = config_named("heads of 32")
    weights = random_weights(config, dtype=torch.float32, seed=6)
    params = SamplingParams(temperature=temperature, top_k=top_k)
    rows = [state_of(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(([3, 1, 4, 1, 5], [9, 2], [7, 7, 7]), 1)]
    plan = Plan((4, 2, 0), (12, 30, 8))
    found = []
    for model in (NativeDecoder(library, config, weights), Decoder(config, weights)):
        drafter = BestFirst(model, BestFirstOptions(width=3, num_children=4), vocab_size=VOCAB)
        noise = Noise(torch.tensor([row.seed for row in rows]), torch.zeros(3, dtype=torch.int64))
        context = Context([row.tokens for row in rows], Sampler(rows, VOCAB, torch.device("cpu")), noise, torch.device("cpu"))
        state = drafter.start([row.tokens for row in rows], {})
        tree = drafter.propose(state, context, plan).tree
        assert state.slots is not None
        found.append((tree, state.slots, state.cache.lengths))
    (ours, slots, lengths), (reference, twin_slots, twin_lengths) = found
    assert ours.sizes == reference.sizes == (13, 17, 1)
    assert lengths == twin_lengths
    for row, size in enumerate(ours.sizes):
        for left, right in ((ours.tokens, reference.tokens), (ours.parents, reference.parents), (slots, twin_slots)):
            assert left[row, :size].tolist() == right[row, :size].tolist()


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_small_trees_ask_about_few_nodes_and_are_the_same(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
    config, asked, found = config_named("heads of 16"), list[int](), list[TokenTree]()
    model = Decoder(config, random_weights(config, dtype=torch.float32, seed=6))
    scored = model.score
    monkeypatch.setattr(
        model, "score", lambda tree, *a, **k: (asked.append(tree.num_nodes - k.get("start", 0)), scored(tree, *a, **k))[1]
    )
    rows = [state_of([3, 1, 4], SamplingParams(temperature=0.7, seed=seed)) for seed in (1, 2)]
    for is_clipped in (True, False):
        if not is_clipped:
            monkeypatch.setattr("outrider.drafters.model.best_first.useful_width", lambda width, plan: width)
        drafter = BestFirst(model, BestFirstOptions(width=6, num_children=6), vocab_size=VOCAB)
        noise = Noise(torch.tensor([row.seed for row in rows]), torch.zeros(2, dtype=torch.int64))
        context = Context([row.tokens for row in rows], Sampler(rows, VOCAB, torch.device("cpu")), noise, torch.device("cpu"))
        state = drafter.start([row.tokens for row in rows], {})
        found.append(drafter.propose(state, context, Plan((4, 3), (num_nodes, num_nodes))).tree)
    assert found[0].sizes == found[1].sizes
    assert torch.equal(found[0].tokens, found[1].tokens) and torch.equal(found[0].parents, found[1].parents)
    half = len(asked) // 2
    assert sum(asked[:half]) < sum(asked[half:])


def state_of(prompt: list[int], params: SamplingParams) -> RequestState:
    return RequestState.of(Request(prompt, params))


def test_random_numbers_are_those_of_the_core(library) -> None:
    config = config_named("heads of 16")
    model = NativeDecoder(library, config, random_weights(config, dtype=torch.float32, seed=6))
    keys = make_key(torch.arange(50)[:, None], torch.arange(20), Purpose.TARGET)
    ours, reference = model.gumbel_stream(keys, 1001), gumbel_stream(keys, 1001)
    assert ours.shape == reference.shape
    torch.testing.assert_close(ours, reference, atol=0, rtol=2e-7)
    assert (ours == reference).float().mean() > 0.9999


@pytest.mark.parametrize("kind", ["heads of 32", "windows", "experts"])
def test_weights_that_were_widened_are_packed_in_sixteen_bits(library, kind: str, monkeypatch) -> None:
    """Scores have the bits of the matrices in 32 bits, for every number of nodes."""
    if not isa_here().reads_halves:
        pytest.skip("this set reads weights of 32 bits as fast")
    config, chance = config_named(kind), random.Random(5)
    weights = random_weights(config, dtype=torch.bfloat16, seed=4)
    widened = widened_weights(weights)
    short = NativeDecoder(library, config, widened)
    monkeypatch.setattr(PackedModel, "_are_short", lambda *_: False)
    whole = NativeDecoder(library, config, widened)
    assert short.num_bytes * 2 == whole.num_bytes and short.dtype == whole.dtype == torch.float32
    tree = TokenTree.of_rows([random_tree(chance, size) for size in (1, 5, 33)])
    found = [model.score(tree, model.new_cache(3)).logits for model in (short, whole)]
    assert all(torch.equal(found[0][row, :size], found[1][row, :size]) for row, size in enumerate(tree.sizes))


def test_weights_of_float32_are_packed_as_they_are(library) -> None:
    config = config_named("heads of 32")
    model = NativeDecoder(library, config, random_weights(config, dtype=torch.float32, seed=4))
    short = NativeDecoder(library, config, random_weights(config, dtype=torch.bfloat16, seed=4))
    assert model.num_bytes == 2 * short.num_bytes


def widened_weights(weights: Weights) -> Weights:
    """The same numbers in float32."""
    layers = [
        replace(layer, **{name: None if tensor is None else tensor.float() for name, tensor in vars(layer).items()})
        for layer in weights.layers
    ]
    embedding = weights.embedding.float()
    head = embedding if weights.head is weights.embedding else weights.head.float()
    bias = None if weights.norm_bias is None else weights.norm_bias.float()
    return Weights(embedding, layers, weights.norm.float(), head, bias)


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.7, 0.0, 1.3)])
def test_choices_are_those_of_the_core(library, temperatures: tuple[float, ...]) -> None:
    config, chance = config_named("heads of 16"), random.Random(8)
    model = NativeDecoder(library, config, random_weights(config, dtype=torch.float32, seed=6))
    rows = [state_of([1, 2], SamplingParams(temperature=t, seed=seed)) for seed, t in enumerate(temperatures, 1)]
    tree = TokenTree.of_rows([random_tree(chance, size) for size in (20, 1, 9)])
    logits = torch.randn(3, 20, VOCAB).round(decimals=1)  # many ties: the first of equals is chosen
    sampler = Sampler(rows, VOCAB, torch.device("cpu"))
    seeds, positions = torch.tensor([row.seed for row in rows]), torch.tensor([0, 7, 30])
    stream = model.gumbel_stream
    ours, reference = (
        sampler.law(logits, tree, Noise(seeds, positions, stream, choose)).choices for choose in (model.choose, None)
    )
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_float32_text_is_the_twins(library, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    prompts = ["Once upon a time", "Lily and Ben went to the park", "The old man looked at the sea and"]
    native, eager = (LLM(dtype="float32", method="plain", fast=fast) for fast in (True, False))
    assert isinstance(native.target, NativeDecoder) and isinstance(eager.target, Decoder)
    texts = [[output.token_ids for output in llm.generate(prompts, params)] for llm in (native, eager)]
    assert texts[0] == texts[1]


def test_who_can_run_natively() -> None:
    config, cpu = config_named("heads of 16"), torch.device("cpu")
    assert can_run(config, torch.bfloat16, cpu)
    assert can_run(config, torch.float16, cpu) and not can_run(config, torch.float64, cpu)
    assert can_run(replace(config, head_dim=24), torch.float32, cpu)
    assert not can_run(replace(config, head_dim=24, qk_norm=True), torch.float32, cpu)
    assert isinstance(load_model(bundled_path("target"), fast=False), Decoder)


def test_a_process_never_changes_its_mind(library, tmp_path) -> None:
    """The first start on a machine waits for the build, says so, and writes the texts of every later start."""
    program = """
from outrider import LLM, SamplingParams
llm = LLM(method="plain", dtype="float32")
params = SamplingParams(max_tokens=20, temperature=0.9, seed=1, ignore_eos=True)
print(type(llm.target).__name__, [llm.generate("Once upon a time", params)[0].token_ids for _ in range(2)])
"""
    compiler = tmp_path / "slow-compiler"  # takes a second, and gives what the real one gave
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] && exit\n'
        f'case "$*" in *sets.cpp*) exec "{find_compiler()}" "$@";; esac\nsleep 1\ncp "{library._name}" "$last"\n'
    )
    compiler.chmod(0o755)
    env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path), "CXX": str(compiler)}
    starts = [run_fresh(program, env=env) for _ in range(2)]
    assert starts[0].stdout == starts[1].stdout and starts[0].stdout.startswith("NativeDecoder")
    assert "building the native CPU pass" in starts[0].stderr and "built in" in starts[0].stderr
    assert "building" not in starts[1].stderr


PROGRAM = """
import warnings
from outrider.models.load import load_model
from outrider.bundled import bundled_path
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = load_model(bundled_path("draft"))
    from outrider.models.native import BUILD
    BUILD.wait()
    print(type(model).__name__, "|".join(str(w.message) for w in caught))
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"OUTRIDER_NATIVE": "0"}, "Decoder "),
        ({"CXX": "no-such-compiler"}, "no C++ compiler was found"),
        ({"CXX": "false", "OUTRIDER_CACHE": "{tmp}"}, "could not be built"),
    ],
)
def test_without_a_compiler_pytorch_does_the_work(changes: dict[str, str], expected: str, tmp_path) -> None:
    chosen = {key: value for key, value in os.environ.items() if key != "OUTRIDER_ISA"}  # a set that nobody could build
    env = {**chosen, **{key: value.format(tmp=tmp_path) for key, value in changes.items()}}
    result = run_fresh(PROGRAM, env=env)
    assert result.returncode == 0 and expected in result.stdout, result.stderr
