"""Recurrent targets: what a tree costs against one token, what replay saves in memory, and that texts stay the same.

    python benchmarks/state_space.py [--families mamba2 bamba falcon_h1] [--device cuda --dtype bfloat16]
    python benchmarks/state_space.py --identity 200 --tokens 24          greedy texts with and without guesses
    python benchmarks/state_space.py --memory 16                         bytes of trees, at the sizes of published models

Models have random weights: the cost of a pass does not depend on them. Passes of all widths take turns in one process; printed
are medians with the first and third quartile, of CPU seconds where PyTorch has one thread, else of wall time. Memory is what
the cache itself counts. Models whose scans are native or kernels take turns with those whose scans are PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider import SamplingParams
from outrider.bench.provenance import keep_results
from outrider.cache.contiguous import ContiguousCache
from outrider.cache.recurrent import RecurrentCache
from outrider.cache.replay import ScanShape
from outrider.core.interfaces import Target
from outrider.core.request import Request
from outrider.core.tree import TokenTree
from outrider.engine.generate import run
from outrider.engine.step import Engine
from outrider.methods import compose
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

_WIDE = {"hidden_size": 768, "vocab_size": 32_000, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {
        "hidden_size": 768, "vocab_size": 32_000, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64,
        "state_size": 128, "n_groups": 1,
    },
    "bamba": {
        **_WIDE, "num_hidden_layers": 16, "intermediate_size": 2048, "mamba_n_heads": 24, "mamba_d_state": 128,
        "mamba_n_groups": 1, "attn_layer_indices": [4, 8, 12],
    },
    "falcon_h1": {
        **_WIDE, "num_hidden_layers": 12, "intermediate_size": 2048, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
        "mamba_d_state": 128, "mamba_n_groups": 1,
    },
    "qwen3_next": {
        **_WIDE, "num_hidden_layers": 12, "intermediate_size": 2048, "num_experts": 0, "full_attention_interval": 4,
        "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "mamba2-780m": {
        "hidden_size": 1536, "vocab_size": 50_288, "num_hidden_layers": 48, "num_heads": 48, "head_dim": 64,
        "state_size": 128, "n_groups": 1,
    },
}  # fmt: skip
"""About 100 to 160 million parameters. The first has the shape of the published Mamba-2 of 130M, the last that of 780M."""
PUBLISHED = {
    "Mamba-2 2.7B": ScanShape(1, 80, 64, 1, 128, 4, 80 * 64 + 2 * 128),
    "Qwen3-Next 80B": ScanShape(1, 32, 128, 16, 128, 4, 32 * 128 + 2 * 16 * 128),
}
"""One recurrent layer of each."""
DEFAULT = ("mamba2", "bamba", "falcon_h1", "qwen3_next")
METHODS = ("prompt-lookup", "suffix", "token-recycling", "draft-model", "best-first")


def tree_of(num_nodes: int, device: torch.device) -> TokenTree:
    """Two branches at every second node: as wide as deep."""
    parents = [-1, *[(node - 1) // 2 * 2 - (node > 2) for node in range(1, num_nodes)]]
    parents = [max(parent, 0) if node else -1 for node, parent in enumerate(parents)]
    return TokenTree.of_rows([(list(range(3, 3 + num_nodes)), parents)], device)


def seconds_of(model: Target, tree: TokenTree, cache: Any) -> float:
    """One pass, and the commit of its root."""
    began = _clock(model.device)
    model.score(tree, cache)
    cache.commit([[0]])
    return _clock(model.device) - began


def costs(models: Mapping[str, RecurrentDecoder], widths: list[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of a pass by scan and nodes, all in turns, each model on one cache."""
    caches = {name: model.new_cache(1) for name, model in models.items()}
    for name, model in models.items():
        model.prefill([[5, 6, 7] * 40], caches[name])
    found: dict[tuple[str, int], list[float]] = {(name, width): [] for name in models for width in widths}
    for number in range(rounds + 3):
        for (name, width), times in found.items():
            model = models[name]
            seconds = seconds_of(model, tree_of(width, model.device), caches[name])
            if number >= 3:
                times.append(seconds)
    return found


def memory(shape: ScanShape, num_nodes: int) -> dict[str, Any]:
    """Megabytes of one layer in float32: steps as the cache keeps them, and a state with its window per node instead."""
    no_attention = ContiguousCache.empty(0, (1, 1, 1), dtype=torch.float32, device=torch.device("cpu"))
    cache = RecurrentCache.empty(shape, no_attention, dtype=torch.float32)
    replay, copies = num_nodes * cache.node_bytes, cache.snapshot_bytes(num_nodes)
    inputs = num_nodes * shape.num_layers * shape.conv_size * 4
    states = num_nodes * shape.num_layers * shape.num_state * 4
    ratios = {"ratio": round(copies / replay, 1), "ratio_without_windows": round(states / (replay - inputs), 1)}
    return {"nodes": num_nodes, "steps_mb": round(replay / 1e6, 3), "states_mb": round(copies / 1e6, 2), **ratios}


def texts(target: Target, method: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(prompt, params, frozenset()) for prompt in prompts]
    done = {s.request: s.state for s in run(Engine(target, method), requests, max_batch_size=8) if s.state.is_finished}
    return [done[number].output_ids for number in range(len(prompts))]


def identity(family: str, num_prompts: int, max_tokens: int) -> dict[str, int]:
    """How many greedy texts are the plain ones, on a tiny float32 model and in batches of 8."""
    rng = random.Random(0)
    target, draft = (random_recurrent(tiny_raw(family), noise=noise) for noise in (0.0, 0.15))
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(num_prompts)]
    plain = texts(target, compose("plain", target), prompts, max_tokens)
    same: dict[str, int] = {}
    for name in METHODS:
        found = texts(target, compose(name, target, draft=draft, policy="fixed"), prompts, max_tokens)
        same[name] = sum(one == other for one, other in zip(found, plain, strict=True))
    return same


def show(family: str, found: Mapping[tuple[str, int], list[float]]) -> list[dict[str, Any]]:
    """The rows of one family."""
    rows: list[dict[str, Any]] = []
    for (scan, width), seconds in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        one = statistics.median(found[scan, min(width for _, width in found)])
        figures = {"ms": round(middle * 1e3, 3), "first_quartile": round(low * 1e3, 3), "third": round(high * 1e3, 3)}
        rows.append({"model": family, "scan": scan, "nodes": width, **figures, "to_one_node": round(middle / one, 3)})
        spread = f"({low * 1e3:.2f} - {high * 1e3:.2f})"
        print(f"{family:<12}{scan:<9}{width:>4} nodes {middle * 1e3:8.2f} ms {spread} {middle / one:6.2f}x")
    return rows


def _clock(device: torch.device) -> float:
    """Seconds; with one CPU thread those of this process, which leave out the time that others have the core."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(DEFAULT), choices=list(SIZES))
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--identity", type=int, default=0, metavar="PROMPTS")
    parser.add_argument("--memory", type=int, default=0, metavar="NODES")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.memory:
        rows = [{"layer": name, **memory(shape, args.memory)} for name, shape in PUBLISHED.items()]
        what = "memory of a tree in one recurrent layer, float32"
        print(json.dumps(keep_results(args.out, what, rows, script="benchmarks/state_space.py")))
        return
    for family in args.families:
        if args.identity:
            same = identity(family.partition("-")[0], args.identity, args.tokens)
            print(f"{family:<12} identical texts of {args.identity}: {same}")
            rows.append({"model": family, "prompts": args.identity, "identical": same})
            continue
        raw, used = tiny_raw(family.partition("-")[0], **SIZES[family]), getattr(torch, args.dtype)
        scans = {"fast": True, "PyTorch": False}
        models = {name: random_recurrent(raw, dtype=used, device=args.device, fast=fast) for name, fast in scans.items()}
        rows += show(family, costs(models, args.widths, args.rounds))
    what = f"passes of recurrent targets on {args.device}, {args.dtype}, {torch.get_num_threads()} threads"
    if args.identity:
        what = (
            f"greedy texts that equal plain decoding's, of {args.identity} prompts in batches of 8, float32, tiny random models"
        )
    print(json.dumps(keep_results(args.out, what, rows, script="benchmarks/state_space.py")))


if __name__ == "__main__":
    main()
