"""Milliseconds of a pass of every model family on the GPU's fast decoder, against the floor of the bytes it must read.

    PYTHONPATH=src python benchmarks/gpu_families.py [--families mistral gemma2 ...] [--layers 8] [--json FILE]

Random weights at the widths of well-known checkpoints, with fewer layers: what counts is the share of the floor, not the text.
The row of 0 nodes is a token of plain decoding in captured rounds; the others are passes launched one by one from Python. The
floor is (weights that a pass reads) / 4.3 TB/s. A mixture of experts reads the experts that its nodes choose, so its floor
grows with the nodes; they are counted with the router's own choices. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider import SamplingParams
from outrider.bench.provenance import keep_results
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.cuda_graphs import Rounds
from outrider.methods import compose
from outrider.models.config import config_of
from outrider.models.decoder_weights import Weights
from outrider.models.experts import chosen_experts
from outrider.models.features import ModelConfig
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import random_weights

BANDWIDTH = 4.3e12
DEVICE = torch.device("cuda")
NODES = (1, 8, 16, 32)
CONTEXT = 1024
Raw = dict[str, Any]


def raw_config(model_type: str, sizes: tuple[int, int, int, int, int], **others: Any) -> Raw:
    """``sizes``: hidden, MLP, heads, key heads, vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {"model_type": model_type, "max_position_embeddings": 32768, **dict(zip(names, sizes, strict=True)), **others}


LITE: Raw = {"n_routed_experts": 64, "first_k_dense_replace": 1}
"""The lite model of DeepSeek-V2; of DeepSeek-V3 a quarter of the experts, since a token chooses 8 whatever there are."""
SHAPES: dict[str, Raw] = {
    "llama": raw_config("llama", (4096, 14336, 32, 8, 128256)),
    "qwen3": raw_config("qwen3", (4096, 12288, 32, 8, 151936), head_dim=128),
    "mistral": raw_config("mistral", (4096, 14336, 32, 8, 32000), sliding_window=512),
    "qwen2": raw_config("qwen2", (3584, 18944, 28, 4, 152064)),
    "smollm3": raw_config("smollm3", (2048, 11008, 16, 4, 128256)),
    "phi3": raw_config("phi3", (3072, 8192, 32, 32, 32064), sliding_window=512),
    "phi4": raw_config("phi3", (5120, 17920, 40, 10, 100352)),
    "gemma": raw_config("gemma", (3072, 24576, 16, 16, 256000), head_dim=256),
    "gemma2": raw_config("gemma2", (3584, 14336, 16, 8, 256000), head_dim=256, sliding_window=512),
    "gemma3": raw_config("gemma3_text", (3840, 15360, 16, 8, 262208), head_dim=256, sliding_window=512),
    "olmo2": raw_config("olmo2", (4096, 11008, 32, 32, 100352)),
    "olmo3": raw_config("olmo3", (4096, 11008, 32, 32, 100352), sliding_window=512),
    "granite": raw_config("granite", (4096, 12800, 32, 8, 49155), residual_multiplier=0.22, logits_scaling=16.0),
    "cohere": raw_config("cohere", (8192, 22528, 64, 64, 256000)),
    "cohere2": raw_config("cohere2", (4096, 14336, 32, 8, 256000), sliding_window=512),
    "stablelm": raw_config("stablelm", (2560, 6912, 32, 32, 50304)),
    "gpt-neox": raw_config("gpt_neox", (4096, 16384, 32, 32, 50432)),
    "starcoder2": raw_config("starcoder2", (4608, 18432, 36, 4, 49152), sliding_window=512),
    "mixtral": raw_config("mixtral", (4096, 14336, 32, 8, 32000), num_local_experts=8, num_experts_per_tok=2),
    "qwen3-moe": raw_config("qwen3_moe", (2048, 6144, 32, 4, 151936), head_dim=128, norm_topk_prob=True),
    "olmoe": raw_config("olmoe", (2048, 1024, 16, 16, 50304)),
    "gpt-oss": raw_config("gpt_oss", (2880, 2880, 64, 8, 201088), num_local_experts=32),
    "deepseek-v2": raw_config(
        "deepseek_v2",
        (2048, 10944, 16, 16, 102400),
        **LITE,
        q_lora_rank=None,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
    ),
    "deepseek-v3": raw_config("deepseek_v3", (7168, 18432, 128, 128, 129280), **LITE),
    "glm4-lite": raw_config("glm4_moe_lite", (2048, 10240, 20, 20, 154880)),
    "youtu": raw_config("youtu", (2048, 6144, 16, 16, 128256)),
    "minicpm3": raw_config("minicpm3", (2560, 6400, 40, 40, 73448)),
}


@dataclass(frozen=True)
class Row:
    """Measurements of one family."""

    family: str
    nodes: int
    ms: float
    floor_ms: float

    @property
    def times_floor(self) -> float:
        return self.ms / self.floor_ms

    def to_json(self) -> dict[str, Any]:
        """A row of the results file."""
        times = {
            "milliseconds": round(self.ms, 3),
            "floor": round(self.floor_ms, 3),
            "of the floor": round(self.times_floor, 2),
        }
        return {"family": self.family, "nodes": self.nodes, **times}


def median_ms(run: Callable[[], Any], repeats: int = 30) -> float:
    for _ in range(5):
        run()
    times = list[float]()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def bytes_read(config: ModelConfig, weights: Weights, num_nodes: int) -> int:
    """Everything but the embedding; of the experts those that ``num_nodes`` random nodes choose."""
    total = sum(tensor.nbytes for tensor in weights.tensors) - weights.embedding.nbytes
    total += weights.embedding.nbytes if weights.head is weights.embedding else 0
    for layer in weights.layers:
        if config.experts is not None and layer.router is not None:
            states = torch.randn(num_nodes, config.hidden_size, device=DEVICE, dtype=layer.router.dtype)
            index, _ = chosen_experts(config.experts, states @ layer.router.T, layer.router_correction)
            idle = config.experts.count - len(index.unique())
            total -= (layer.gate_up.nbytes + layer.down.nbytes) // config.experts.count * idle
    return total


def tokens_per_second(decoder: FastDecoder, num_tokens: int = 128) -> float:
    """Plain decoding in captured rounds, as a user calls it; the second of two runs."""
    rounds, method = Rounds(decoder), compose("plain", decoder)
    prompt = [(7 * place) % 30000 for place in range(CONTEXT)]
    speed = 0.0
    for _ in range(2):
        request = Request(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        states = [step.state for step in rounds.run(method, [request], max_batch_size=1)]
        speed = states[-1].stats.tokens_per_second
    return speed


def measure(name: str, num_layers: int) -> list[Row]:
    config = config_of({**SHAPES[name], "num_hidden_layers": num_layers})
    assert config is not None
    weights = random_weights(config, dtype=torch.bfloat16, device=DEVICE)
    floors = {nodes: bytes_read(config, weights, nodes) / BANDWIDTH * 1e3 for nodes in NODES}
    decoder = FastDecoder(config, weights)
    cache = decoder.new_cache(1)
    decoder.prefill([[(7 * place) % 30000 for place in range(CONTEXT)]], cache)
    rows = [Row(name, 0, 1e3 / tokens_per_second(decoder), floors[1])]
    for nodes in NODES:
        tree = TokenTree.chain(torch.randint(0, 30000, (1, nodes), device=DEVICE))
        ms = median_ms(lambda tree=tree: decoder.score(tree, cache))
        rows.append(Row(name, nodes, ms, floors[nodes]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    what = f"a pass of {arguments.layers} layers with random weights, in milliseconds, and the floor of the bytes it reads"
    found, failed = list[dict[str, Any]](), dict[str, str]()
    print(f"{'family':10} {'nodes':>5} {'ms':>7} {'floor':>7} {'x floor':>7}", flush=True)
    for name in arguments.families:
        try:
            rows = measure(name, arguments.layers)
        except Exception as error:  # one family's kernel must not hide the others'
            failed[name] = f"{type(error).__name__}: {error}"[:500]
            print(f"{name:10} {failed[name][:300]}", flush=True)
            continue
        for row in rows:
            print(f"{row.family:10} {row.nodes:5d} {row.ms:7.3f} {row.floor_ms:7.3f} {row.times_floor:7.2f}", flush=True)
        found += [row.to_json() for row in rows]
        keep_results(arguments.json, what, found, script="benchmarks/gpu_families.py", failed=failed)
        torch.cuda.empty_cache()
    print(json.dumps({"rows": found, "failed": failed}))


if __name__ == "__main__":
    main()
