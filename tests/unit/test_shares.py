"""Every family in two shares: threads that meet at the sums compute what the whole model does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core.tree import TokenTree
from outrider.models.decoder import Decoder
from outrider.models.decoder_weights import Weights
from outrider.models.random_decoder import tiny_config, tiny_weights
from outrider.models.rank_sums import Joint
from outrider.models.share import Share

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 12}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
LATENT |= {"n_group": 2, "topk_group": 1}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "starcoder2": {},
    "gpt_neox": {},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "stablelm": {"qk_layernorm": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "attention_bias": True, "first_k_dense_replace": 1},
}


class Meeting:
    """Where the threads of a pass leave their terms."""

    def __init__(self, size: int) -> None:
        self.terms: list[Tensor] = [torch.zeros(0)] * size
        self.barrier = threading.Barrier(size, timeout=30)


class ThreadJoint(Joint):
    """A rank that is a thread."""

    def __init__(self, meeting: Meeting, rank: int, spans: Sequence[tuple[int, int]]) -> None:
        self._meeting, self.rank, self.spans = meeting, rank, spans

    def gather(self, values: Tensor) -> list[Tensor]:
        self._meeting.terms[self.rank] = values
        self._meeting.barrier.wait()
        found = list(self._meeting.terms)
        self._meeting.barrier.wait()
        return found

    def of(self, rank: int, values: Tensor) -> Tensor:
        return self.gather(values)[rank]


def shares_of(family: str, size: int = 2) -> tuple[Decoder, list[Decoder]]:
    config = tiny_config(family, **FAMILIES[family])
    weights = tiny_weights(config)
    meeting, found = Meeting(size), list[Decoder]()
    for rank in range(size):
        share = Share(rank, size)
        share.check(config)
        embedding = share.rows(weights.embedding)
        head = embedding if weights.head is weights.embedding else share.rows(weights.head)
        layers = [share.layer(config, layer) for layer in weights.layers]
        mine: Weights = replace(weights, embedding=embedding, layers=layers, head=head)
        spans = [Share(other, size).span(config.vocab_size) for other in range(size)]
        joint = ThreadJoint(meeting, rank, spans)
        found.append(Decoder(share.config(config), mine, joint=joint))
    return Decoder(config, weights), found


def logits_of(model: Decoder) -> Tensor:
    cache = model.new_cache(2)
    model.prefill([[3, 1, 4, 1], [5, 9]], cache)
    tree = TokenTree.of_rows([([2, 6, 5, 3], [-1, 0, 0, 1]), ([7, 8], [-1, 0])])
    return model.score(tree, cache).logits


@pytest.mark.parametrize("family", list(FAMILIES))
def test_two_shares_are_the_whole(family: str) -> None:
    whole, shares = shares_of(family)
    with ThreadPoolExecutor(len(shares)) as threads:
        parts = list(threads.map(logits_of, shares))
    expected = logits_of(whole)
    torch.testing.assert_close(torch.cat(parts, -1)[0], expected[0], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(torch.cat(parts, -1)[1, :2], expected[1, :2], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_matrices_are_divided_and_nothing_is_lost(family: str) -> None:
    config = tiny_config(family, **FAMILIES[family])
    weights = tiny_weights(config)
    for layer in weights.layers:
        parts = [Share(rank, 2).layer(config, layer) for rank in range(2)]
        latents = ("query_up", "key_up", "value_up", "shared_gate_up", "shared_down")
        for name in ("out", "gate_up", "down", *(("qkv",) if config.latent is None else latents)):
            assert vars(layer)[name] is None or sum(vars(part)[name].numel() for part in parts) == vars(layer)[name].numel()
        for name in ("out_bias", "down_bias"):
            assert vars(parts[1])[name] is None, "a bias behind a sum is added once"
