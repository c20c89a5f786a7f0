"""What passes, prompts and loading cost on this CPU, type by type, on one thread.

    python benchmarks/cpu_passes.py [--types float32 bfloat16 int8 int4] [--gguf FILE] [--prompt 800] [--json FILE]

The bundled target is opened in every type, or the GGUF file as stored and in the types that are named. A type that ends in
``-torch`` runs the PyTorch twin. Types take turns, and a figure is the least CPU time of the thread, since machines are shared.
The floor of a pass in floats is the larger of two times: bytes over the speed of a plain sum, and multiply-adds over PyTorch's
rate in a large product. Memory is what opening the file adds to a fresh process, and what it has after a prompt of 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.bench.provenance import results_head
from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.tree import TokenTree
from outrider.models.load import load_model
from outrider.models.native import NativeDecoder, isa_here, ready_to_measure

NODES: tuple[int, ...] = (1, 4, 16, 64)
CONTEXT = 128
CHILD = """
import resource, sys, time, torch
from outrider.models.load import load_model
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()
torch.set_num_threads(1)
before, began = resident(), time.process_time()
model = load_model(sys.argv[1], dtype=sys.argv[2], device='cpu')
seconds, added = time.process_time() - began, resident() - before
model.prefill([[5 + i % 900 for i in range(128)]], model.new_cache(1))
print(seconds, added, resident() - before)
"""


def opened(path: str, kind: str) -> Target:
    return load_model(path, dtype=kind.removesuffix("-torch"), device="cpu", fast=not kind.endswith("-torch"))


def cpu_ms(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def multiply_rate() -> float:
    """Multiply-adds of a second in float32, on this thread."""
    x, w = torch.randn(512, 1024), torch.randn(1024, 1024)
    return x.numel() * 1024 / min(cpu_ms(lambda: x @ w) for _ in range(6)) * 1e3


def bytes_per_ms() -> float:
    """Bytes that this thread reads from memory in a millisecond of its own time, beyond any cache."""
    numbers = torch.ones(1 << 26)
    return numbers.nbytes / min(cpu_ms(numbers.sum) for _ in range(5))


def pass_costs(models: dict[str, Target], repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a pass over a chain of nodes, after a prompt."""
    caches = {kind: model.new_cache(1) for kind, model in models.items()}
    for kind, model in models.items():
        model.prefill([[5 + i % 900 for i in range(CONTEXT)]], caches[kind])
    trees = {nodes: TokenTree.chain(torch.arange(5, 5 + nodes)[None]) for nodes in NODES}
    least = {kind: dict.fromkeys(NODES, float("inf")) for kind in models}
    for _ in range(repeats):
        for kind, model in models.items():
            for nodes, tree in trees.items():
                spent = cpu_ms(lambda model=model, tree=tree, kind=kind: model.score(tree, caches[kind]))
                least[kind][nodes] = min(least[kind][nodes], spent)
    return least


def prompt_costs(models: dict[str, Target], length: int, repeats: int) -> dict[str, float]:
    """Milliseconds of reading a prompt."""
    least, prompt = dict.fromkeys(models, float("inf")), [[5 + i % 900 for i in range(length)]]
    for _ in range(repeats):
        for kind, model in models.items():
            least[kind] = min(least[kind], cpu_ms(lambda model=model: model.prefill(prompt, model.new_cache(1))))
    return least


def opening(path: str, kind: str) -> dict[str, float]:
    """Seconds of loading and bytes of memory, of a process that does nothing else."""
    run = subprocess.run([sys.executable, "-c", CHILD, path, kind], capture_output=True, text=True, check=True, timeout=600)
    seconds, added, after = map(float, run.stdout.split())
    return {"load_cpu_s": round(seconds, 2), "loaded_mb": round(added / 1e6), "after_prompt_mb": round(after / 1e6)}


def rows_of(path: str, kinds: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for every type."""
    models = {kind: opened(path, kind) for kind in kinds}
    costs = pass_costs(models, args.repeats)
    prompts = prompt_costs(models, args.prompt, args.prompt_repeats) if args.prompt else {}
    rate, read_rate, rows = multiply_rate(), bytes_per_ms(), list[dict[str, Any]]()
    for kind, model in models.items():
        name = Path(path).name if path.endswith(".gguf") else "bundled target"
        row: dict[str, Any] = {"model": name, "type": kind, "pass_ms": {n: round(ms, 2) for n, ms in costs[kind].items()}}
        row["16_over_1"] = round(costs[kind][16] / costs[kind][1], 2)
        if isinstance(model, NativeDecoder):
            read_ms = model.num_bytes / read_rate
            row |= {"matrices_mb": round(model.num_bytes / 1e6, 1), "floor_of_bytes_ms": round(read_ms, 2)}
            if kind == "float32":
                macs = model.num_bytes / 4
                row["floor_of_pass_ms"] = {n: round(max(read_ms, 1e3 * n * macs / rate), 2) for n in NODES}
            if path.endswith(".gguf"):
                row |= {"file_mb": round(Path(path).stat().st_size / 1e6), **opening(path, kind)}
        if kind in prompts:
            row |= {"prompt_tokens": args.prompt, "prompt_ms": round(prompts[kind])}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16", "int8", "int4", "float32-torch"])
    parser.add_argument("--gguf", type=Path, help="a GGUF file instead of the bundled target")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt that is read; 0: none")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prompt-repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ready_to_measure()
    what = f"least CPU milliseconds of passes and prompts on one thread ({isa_here().name}), types in turns"
    document = results_head(what, script="benchmarks/cpu_passes.py")
    document["command"] = " ".join(Path(word).name if word.endswith(".gguf") else word for word in document["command"].split())
    document["rows"] = rows_of(str(args.gguf or bundled_path("target")), args.types, args)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
