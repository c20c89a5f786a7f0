"""Families on a CPU: CPU milliseconds of a pass in the native pass and in PyTorch, on one thread, in turns.

    PYTHONPATH=src python benchmarks/cpu_families.py [--families mixtral deepseek] [--repeats 9] [--json FILE]

The models are small cuts of the published shapes with random weights in float32, so the figures compare two programs on one
machine and say nothing of the models. A row is the least of the repeats: other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from outrider.bench.provenance import keep_results
from outrider.core.layered_target import LayeredTarget
from outrider.core.tree import TokenTree
from outrider.models.config import config_of
from outrider.models.decoder import Decoder
from outrider.models.native import native_decoder
from outrider.models.random_decoder import random_weights

CONTEXT, NODES = 256, (1, 8, 32)
SIZES: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 8192},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096},
}
DENSE = {"intermediate_size": 2816, "num_key_value_heads": 16}
LATENT = {
    **{"kv_lora_rank": 256, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    **{"n_routed_experts": 32, "n_shared_experts": 2, "moe_intermediate_size": 256, "num_experts_per_tok": 4},
    **{"num_key_value_heads": 16, "first_k_dense_replace": 0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "intermediate_size": 2816},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1792},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384},
    "olmoe": {"model_type": "olmoe", "num_experts": 32, "num_experts_per_tok": 4, "num_key_value_heads": 16},
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64},
    "deepseek": {"model_type": "deepseek_v2", **LATENT},
    "olmo2": {"model_type": "olmo2", **DENSE},
    "cohere": {"model_type": "cohere", **DENSE},
    "gpt-neox": {"model_type": "gpt_neox", **DENSE},
}


def decoders(name: str) -> dict[str, LayeredTarget]:
    """One model in both programs."""
    config = config_of({**SIZES, **FAMILIES[name]})
    assert config is not None
    weights = random_weights(config, dtype=torch.float32, device=torch.device("cpu"))
    native = native_decoder(config, weights)
    if native is None:
        raise SystemExit("the native pass cannot be had here; this compares it with PyTorch")
    return {"native_ms": native, "pytorch_ms": Decoder(config, weights)}


def least_ms(models: dict[str, LayeredTarget], num_nodes: int, repeats: int) -> dict[str, float]:
    """CPU milliseconds of a pass behind the same text, the least of the repeats, in turns."""
    tree, found = TokenTree.chain(torch.arange(num_nodes)[None] * 7), dict[str, float]()
    caches = {name: model.new_cache(1) for name, model in models.items()}
    for name, model in models.items():
        model.prefill([[5 * token % 8192 for token in range(CONTEXT)]], caches[name])
        model.score(tree, caches[name])
    for _ in range(repeats):
        for name, model in models.items():
            began = time.process_time()
            model.score(tree, caches[name])
            spent = 1e3 * (time.process_time() - began)
            found[name] = min(spent, found.get(name, spent))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    what = f"CPU milliseconds of a pass behind {CONTEXT} tokens on one thread, small cuts of the families in float32"
    rows = list[dict[str, Any]]()
    for name in arguments.families:
        models = decoders(name)
        for num_nodes in NODES:
            found = least_ms(models, num_nodes, arguments.repeats)
            rows.append({"family": name, "nodes": num_nodes, **{key: round(ms, 2) for key, ms in found.items()}})
            rows[-1]["times_as_fast"] = round(found["pytorch_ms"] / found["native_ms"], 2)
            print(json.dumps(rows[-1]), flush=True)
            keep_results(arguments.json, what, rows, script="benchmarks/cpu_families.py")


if __name__ == "__main__":
    main()
