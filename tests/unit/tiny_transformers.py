"""Tiny random models of transformers, ragged prompts, and the comparison with plain ``generate``."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import outrider.transformers as drop_in

VOCAB = 53
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys("llama qwen2 qwen3 phi phi3 olmo olmo2 gpt_neox granite cohere cohere2".split(), LLAMA),
    **dict.fromkeys(("starcoder2", "falcon"), LLAMA),
    "mistral": {**LLAMA, "sliding_window": 5},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {**LLAMA, "head_dim": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": GPT,
}
RAGGED = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 11, 12]])
MASK = (RAGGED != 0).long()
GREEDY: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}
PROCESSORS: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 8}
SAMPLED: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 20}


def random_model(family: str) -> Any:
    torch.manual_seed(0)
    # eager: the fused kernels of some versions leave out the soft cap of attention scores
    model: Any = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**SIZES, **FAMILIES[family]), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


@cache
def shared(family: str = "qwen3") -> Any:
    """A model that several tests read and none changes."""
    return random_model(family)


@cache
def noisy() -> Any:
    """A draft that is often right: the model's weights with noise."""
    model = copy.deepcopy(shared())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


def both(model: Any, loop: drop_in.DropIn, **options: Any) -> Tensor:
    """The text of ``generate``, which must be the same with the drop-in."""
    expected = model.generate(RAGGED, **options)
    assert torch.equal(model.generate(RAGGED, **options, custom_generate=loop), expected)
    return expected
