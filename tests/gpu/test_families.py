"""Every model family on the GPU's fast decoder, against the lean decoder on the same weights, both in bfloat16.

    PYTHONPATH=src python -m pytest tests/gpu/test_families.py

Random weights, narrow and as wide as real checkpoints; prompts longer than the windows; chains, trees and ragged batches
through captured passes. The reference is the lean decoder in float32: the fast one may be as far from it as rounding takes
the lean one in bfloat16, and no further.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import SamplingParams
from outrider.core.interfaces import Target
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.cuda_graphs import Rounds
from outrider.methods import compose
from outrider.models.config import config_of
from outrider.models.decoder import Decoder
from outrider.models.features import ModelConfig
from outrider.models.random_decoder import random_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = torch.device("cuda")
VOCAB = 512
NARROW = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
LATENT = {"moe_intermediate_size": 192, "first_k_dense_replace": 1}
"""Beside the sizes of latents and heads that every checkpoint has."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64}),
    "llama-biases": ("llama", {"head_dim": 64, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"head_dim": 64}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "smollm3": ("smollm3", {"head_dim": 64, "no_rope_layer_interval": 2}),
    "mistral": ("mistral", {"head_dim": 128, "sliding_window": 128}),
    "phi3": ("phi3", {"head_dim": 96, "sliding_window": 130}),
    "gemma": ("gemma", {"head_dim": 256}),
    "gemma2": ("gemma2", {"head_dim": 256, "sliding_window": 128, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {"head_dim": 256, "sliding_window": 128, "sliding_window_pattern": 2}),
    "olmo2": ("olmo2", {"head_dim": 64}),
    "olmo3": ("olmo3", {"head_dim": 64, "sliding_window": 128}),
    "granite": ("granite", {"head_dim": 64, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 2.0}),
    "cohere": ("cohere", {"head_dim": 64, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2}),
    "stablelm": ("stablelm", {"head_dim": 64, "use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm-80": ("stablelm", {"head_dim": 80, "use_parallel_residual": True}),
    "gpt-neox": ("gpt_neox", {"head_dim": 64}),
    "starcoder2": ("starcoder2", {"head_dim": 64, "sliding_window": 200}),
    "mixtral": ("mixtral", {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 64, "num_experts": 64, "moe_intermediate_size": 384}),
    "olmoe": ("olmoe", {"head_dim": 64, "num_experts": 32, "intermediate_size": 384}),
    "gpt-oss": ("gpt_oss", {"head_dim": 64, "num_local_experts": 16, "intermediate_size": 320}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_routed_experts": 32, "num_experts_per_tok": 6}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 384, "n_routed_experts": 64, "attention_bias": True}),
    "glm4-moe-lite": ("glm4_moe_lite", {**LATENT, "q_lora_rank": 384, "n_routed_experts": 32, "num_attention_heads": 20}),
    "minicpm3": ("minicpm3", {"q_lora_rank": 384}),
    "deepseek-dense": ("deepseek_v3", {**LATENT, "q_lora_rank": 384, "first_k_dense_replace": 3}),
}
CASES = [(name, "narrow", "fast") for name in FAMILIES]
INVARIANT = ("mistral", "gemma2", "olmo2", "cohere2", "qwen3-moe", "gpt-oss", "deepseek-v3", "deepseek-dense")
CASES += [(name, "wide", "fast") for name in (*INVARIANT, "deepseek-v2")]
CASES += [(name, "narrow", "invariant") for name in INVARIANT]


def config_for(name: str, size: str) -> ModelConfig:
    family, changes = FAMILIES[name]
    sizes = NARROW if size == "narrow" else WIDE
    raw = {**sizes, "num_hidden_layers": 3, "vocab_size": VOCAB, "max_position_embeddings": 2048, **changes}
    config = config_of({"model_type": family, "tie_word_embeddings": False, **raw})
    assert config is not None
    return config


def decoders(config: ModelConfig, numerics: str = "fast") -> tuple[Decoder, Decoder, Any]:
    """The reference in float32, the lean decoder in bfloat16, the fast one."""
    from outrider.models.gpu.decoder import FastDecoder

    lean = random_weights(config, dtype=torch.bfloat16, device=DEVICE)
    exact = random_weights(config, dtype=torch.float32, device=DEVICE, rounded=torch.bfloat16)
    return Decoder(config, exact), Decoder(config, lean), FastDecoder(config, lean, numerics=numerics)


def prompts(draw: random.Random, *lengths: int) -> list[list[int]]:
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


def trees(draw: random.Random, *sizes: int) -> TokenTree:
    rows = [
        ([draw.randrange(VOCAB) for _ in range(n)], [-1, *sorted(draw.randrange(node) for node in range(1, n))]) for n in sizes
    ]
    return TokenTree.of_rows(rows, DEVICE)


def scores(model: Target, texts: list[list[int]], steps: list[TokenTree]) -> list[Tensor]:
    """Logits of each tree on the cache of the texts, its first node committed before the next."""
    cache, found = model.new_cache(len(texts)), list[Tensor]()
    model.prefill(texts, cache)
    for tree in steps:
        logits = model.score(tree, cache).logits.float()
        found.append(torch.cat([logits[row, :size] for row, size in enumerate(tree.sizes)]))
        cache.commit([[0]] * len(texts))
    return found


@pytest.mark.parametrize(("name", "size", "numerics"), CASES, ids=map("-".join, CASES))
def test_scores_are_those_of_the_lean_decoder(name: str, size: str, numerics: str) -> None:
    """As near to float32 as the lean decoder in bfloat16 is: at most nodes, and of dense models at all. (Where two experts are
    as good as each other, rounding chooses, and a node then says something else.)"""
    draw, config = random.Random(3), config_for(name, size)
    exact, lean, fast = decoders(config, numerics)
    texts = prompts(draw, 300, 41, 5)
    chain = TokenTree.chain(torch.tensor([[draw.randrange(VOCAB) for _ in range(4)] for _ in texts], device=DEVICE))
    one = TokenTree.chain(torch.tensor([[7]] * 3, device=DEVICE))
    steps = [trees(draw, 13, 9, 1), chain, one]
    found = [scores(model, texts, steps) for model in (exact, lean, fast)]
    is_dense = config.experts is None or not any(config.experts.layers)
    if not is_dense:  # the median of three nodes is one node, which may have chosen otherwise
        found = [[torch.cat(of_steps)] for of_steps in found]
    for expected, theirs, ours in zip(*found, strict=True):
        assert ours.isfinite().all()
        spread = float(expected.std())
        far, near = ((logits - expected).abs().mean(-1) for logits in (ours, theirs))
        bound = 2 * float(near.median()) + 0.004 * spread
        assert float(far.median()) <= bound, (float(far.median()), bound, spread)
        assert not is_dense or float(far.max()) <= 2 * float(near.max()) + 0.01 * spread


@pytest.mark.parametrize("name", INVARIANT)
def test_invariant_scores_of_a_tree_are_those_of_plain_decoding(name: str) -> None:
    """Bit for bit, at every fifth node, with the root in the middle of a window."""
    draw = random.Random(5)
    _, _, fast = decoders(config_for(name, "narrow"), "invariant")
    (text,), tree = prompts(draw, 270), trees(draw, 20)
    cache = fast.new_cache(1)
    fast.prefill([text], cache)
    whole = fast.score(tree, cache).logits[0].clone()
    for node in range(1, 20, 5):
        alone = fast.new_cache(1)
        fast.prefill([text], alone)
        one = whole[0]
        for step in (0, *tree.path(0, node)):
            one = fast.score(TokenTree.chain(tree.tokens[:, step : step + 1]), alone).logits[0, 0]
            alone.commit([[0]])
        assert torch.equal(one, whole[node]), node


ROUNDS: list[tuple[str, dict[str, Any]]] = [
    ("draft-model", {"num_draft_tokens": 3}),
    ("draft-tree", {"branching": (3, 2, 1), "num_draft_tokens": 3, "num_tree_nodes": 15}),
    ("best-first", {"num_draft_tokens": 5, "num_tree_nodes": 31}),
]


@pytest.mark.parametrize(("name", "options"), ROUNDS, ids=[name for name, _ in ROUNDS])
@pytest.mark.parametrize("page_len", [16, 64])
def test_captured_rounds_on_latents_say_what_plain_decoding_says(name: str, options: dict[str, Any], page_len: int) -> None:
    """Bit for bit, with prompts that are read inside the rounds of others; the draft is the target but for its last layer."""
    from outrider.models.gpu.decoder import FastDecoder

    config = config_for("deepseek-dense", "narrow")
    weights = random_weights(config, dtype=torch.bfloat16, device=DEVICE)
    target = FastDecoder(config, weights, numerics="invariant", page_len=page_len)
    shorter = {"num_layers": 2, "rope_of_layer": config.rope_of_layer[:2], "windows": config.windows[:2]}
    draft = FastDecoder(replace(config, **shorter), replace(weights, layers=weights.layers[:2]), numerics="invariant")
    texts = prompts(random.Random(7), 300, 41, 5, 64)
    requests = [Request(text, SamplingParams(max_tokens=40, ignore_eos=True)) for text in texts]

    def said(method: str, some: list[Request], **parts: Any) -> list[list[int]]:
        """The tokens of every request, prompt and output, by prompt."""
        steps = Rounds(target).run(compose(method, target, **parts), some, max_batch_size=2)
        states = {len(step.state.request.prompt_ids): step.state for step in steps}
        return [list(states[len(request.prompt_ids)].tokens) for request in some]

    expected = [said("plain", [request])[0] for request in requests]
    assert said(name, requests, draft=draft, options=options) == expected
