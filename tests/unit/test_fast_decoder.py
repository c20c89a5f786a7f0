"""The GPU decoder against its oracle, ``models/decoder.py``: interpreted on a CPU, so without graphs (tests/gpu has those)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.cache.paged import PagedCache
from outrider.core.resume import Resume
from outrider.core.route import Route
from outrider.core.tree import TokenTree
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.packed import Packed
from outrider.models.random_decoder import tiny_config, tiny_weights
from outrider.models.weights import Weights

PROMPTS = [[5, 9, 1, 33, 7], [2, 8]]
TREE = TokenTree.of_rows([([3, 4, 5, 6, 7], [-1, 0, 0, 1, 2]), ([9, 8, 1, 2], [-1, 0, 1, 2])], DEVICE)


def pair(config: ModelConfig, numerics: str = "fast", page_len: int = 8) -> tuple[Decoder, FastDecoder]:
    weights = tiny_weights(config, device=str(DEVICE))
    return Decoder(config, weights), FastDecoder(config, weights, numerics=numerics, page_len=page_len)


def config_named(family: str, **changes: Any) -> ModelConfig:
    return tiny_config(family, **{"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, **changes})


LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10}
LATENT |= {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 4}),
    "gemma2": ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "sliding_window_pattern": 2}),
    "phi3": ("phi3", {"head_dim": 24}),
    "olmo2": ("olmo2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "granite": ("granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "cohere": ("cohere", {"use_qk_norm": True, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "cohere2": ("cohere2", {"sliding_window": 4, "sliding_window_pattern": 2}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    "gpt-neox": ("gpt_neox", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 2}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "attention_bias": True, "first_k_dense_replace": 1}),
}
"""One model for every feature; windows that end inside the prompts."""
LONG_PROMPTS = [[5, 9, 1, 33, 7, 2, 2, 41, 8], [2, 8, 60]]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_feature_scores_as_the_oracle_does(name: str, numerics: str) -> None:
    family, changes = FAMILIES[name]
    eager, fast = pair(config_named(family, **changes), numerics)
    caches = eager.new_cache(2), fast.new_cache(2)
    for model, cache in zip((eager, fast), caches, strict=True):
        model.prefill(LONG_PROMPTS, cache)
    for tree in (TREE, TokenTree.chain(torch.tensor([[3, 4, 5], [9, 8, 1]], device=DEVICE))):
        expected = eager.score(tree, caches[0], taps=(1,))
        caches[1].reserve(tree.num_nodes)
        logits, tapped = fast.forward(tree.tokens, fast.step_of(tree, caches[1]), taps=(1,))
        for row, size in enumerate(tree.sizes):
            torch.testing.assert_close(logits[row, :size], expected.logits[row, :size], atol=3e-3, rtol=1e-3)
            torch.testing.assert_close(tapped[1][row, :size], expected.taps[1][row, :size], atol=2e-3, rtol=1e-3)
        for cache in caches:
            cache.commit([[0, 1], [0, 1]])


@pytest.mark.parametrize(
    ("family", "numerics", "page_len"),
    [("llama", "fast", 64), ("qwen2", "fast", 8), ("qwen3", "fast", 8), ("llama", "invariant", 8), ("llama", "fast", 4)],
)
def test_scores_are_those_of_the_oracle(family: str, numerics: str, page_len: int) -> None:
    eager, fast = pair(config_named(family), numerics, page_len)
    caches = eager.new_cache(2), fast.new_cache(2)
    taps = (0, 1, 2)
    expected_taps, got_taps = (m.prefill(PROMPTS, c, taps=taps) for m, c in zip((eager, fast), caches, strict=True))
    for tap in taps:
        for row in range(2):
            torch.testing.assert_close(got_taps[tap][row], expected_taps[tap][row], atol=1e-3, rtol=1e-3)
    for _ in range(2):
        expected = eager.score(TREE, caches[0], taps=taps)
        caches[1].reserve(TREE.num_nodes)
        logits, tapped = fast.forward(TREE.tokens, fast.step_of(TREE, caches[1]), taps=taps)
        for row, size in enumerate(TREE.sizes):
            torch.testing.assert_close(logits[row, :size], expected.logits[row, :size], atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(tapped[2][row, :size], expected.taps[2][row, :size], atol=2e-3, rtol=1e-3)
        for cache in caches:
            cache.commit([[0, 2, 4], [0, 1]])


def test_a_single_node_and_part_of_a_model() -> None:
    eager, fast = pair(config_named("llama"))
    caches = eager.new_cache(1), fast.new_cache(1)
    for model, cache in zip((eager, fast), caches, strict=True):
        model.prefill(PROMPTS[:1], cache)
    root = TokenTree.chain(torch.tensor([[3]], device=DEVICE))
    caches[1].reserve(1)
    logits, _ = fast.forward(root.tokens, fast.step_of(root, caches[1]))
    torch.testing.assert_close(logits, eager.score(root, caches[0]).logits, atol=2e-3, rtol=1e-3)
    chain = TokenTree.chain(torch.tensor([[3, 4, 5]], device=DEVICE))
    for route in (Route.first(1, 2), Route.without(2, mlp=[0]), Route.without(2, attention=[1])):
        expected = eager.exit(chain, caches[0], route=route)
        torch.testing.assert_close(fast.exit(chain, caches[1], route=route), expected, atol=2e-3, rtol=1e-3)
    begun = Resume(1, fast.exit(chain, caches[1], route=Route.first(1, 2)))
    found = fast.exit(chain, caches[1], route=Route.first(2, 2), begun=begun)
    expected = eager.exit(chain, caches[0], route=Route.first(2, 2))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_are_those_of_the_rounded_model(bits: int) -> None:
    """4 bits where inputs come in groups of 128, which only some of a small model's matrices do."""
    config = tiny_config("llama", head_dim=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128)
    weights = tiny_weights(config, device=str(DEVICE))
    fast = FastDecoder(config, weights, bits=bits)
    assert fast.weights.bytes_read < FastDecoder(config, weights).weights.bytes_read / 3
    assert {layer.down.bits for layer in fast.weights.layers} == {bits}  # type: ignore[union-attr]

    def rounded(matrix: Packed) -> torch.Tensor:
        return matrix.unpacked()

    layers = [
        replace(old, **{name: rounded(vars(new)[name]) for name in ("qkv", "out", "gate_up", "down")})
        for old, new in zip(weights.layers, fast.weights.layers, strict=True)
    ]
    assert isinstance(fast.weights.head, Packed)
    eager = Decoder(config, Weights(weights.embedding, layers, weights.norm, rounded(fast.weights.head)))
    caches = eager.new_cache(2), fast.new_cache(2)
    for model, cache in zip((eager, fast), caches, strict=True):
        model.prefill(PROMPTS, cache)
    caches[1].reserve(TREE.num_nodes)
    logits, _ = fast.forward(TREE.tokens, fast.step_of(TREE, caches[1]))
    expected = eager.score(TREE, caches[0]).logits
    for row, size in enumerate(TREE.sizes):
        torch.testing.assert_close(logits[row, :size], expected[row, :size], atol=2e-3, rtol=1e-3)


def test_the_head_reads_slices() -> None:
    """A slice of some states is no block of memory; a kernel that takes it for one reads its neighbours."""
    eager, fast = pair(config_named("llama"))
    hidden = torch.randn(2, 3, fast.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.testing.assert_close(fast.logits(hidden[:, -1:]), eager.logits(hidden[:, -1:]), atol=2e-3, rtol=1e-3)


def test_rows_that_begin_alike_share_pages() -> None:
    eager, fast = pair(config_named("llama"), page_len=4)
    cache = fast.new_cache(1)
    fast.prefill([[*PROMPTS[0], 3, 1]], cache)
    twins = PagedCache.of_runs(fast.pool, [cache.run(0, 7), cache.run(0, 5)])
    assert fast.pool.num_used == 2
    fast.prefill([[4, 4, 4], [9]], twins)
    other = eager.new_cache(2)
    eager.prefill([[*PROMPTS[0], 3, 1, 4, 4, 4], [*PROMPTS[0], 9]], other)
    twins.reserve(TREE.num_nodes)
    logits, _ = fast.forward(TREE.tokens, fast.step_of(TREE, twins))
    expected = eager.score(TREE, other).logits
    for row, size in enumerate(TREE.sizes):
        torch.testing.assert_close(logits[row, :size], expected[row, :size], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("head_dim", [16, 12])
def test_tokens_at_positions_of_their_own(head_dim: int) -> None:
    """A prompt with an axis of positions per pair of dimensions, beside an empty row, then a tree at its slots."""
    eager, fast = pair(config_named("llama", head_dim=head_dim))
    prompt = [5, 9, 1, 33, 7]
    positions = torch.randn(len(prompt), head_dim // 2, generator=torch.Generator().manual_seed(0)) * 3
    states = []
    for model in (eager, fast):
        cache = model.new_cache(2)
        model.prefill([[], [2, 8, 60, 4, 4, 4, 1]], cache)
        model.placed(positions).prefill([prompt, []], cache)
        assert cache.lengths == [5, 7]
        states.append(model.exit(TREE, cache, route=Route.first(2, 2))[TREE.valid])
    torch.testing.assert_close(states[0], states[1], atol=2e-3, rtol=1e-3)
