"""Where the time of a pass goes on a GPU: every kernel of a layer next to the time it would take at the device's full rate.

    PYTHONPATH=src python benchmarks/gpu_kernels.py [--passes 32x3 64x3 64x5] [--prompts 2048 8192] [--context 512]
        [--chunks 512 1024 2048] [--numerics fast invariant] [--json FILE]

A pass is rows x nodes of each row, captured and replayed; a prompt is read as ``LLM`` reads one, without a graph. The kernels
of one pass are taken from a trace. Layers repeat, so a kernel is known by its place in a layer, and its time is the mean over
layers. *Step* is the time from its start to the next kernel's: a sum of steps is the pass, gaps and overlaps included. The
floor is the larger of bytes / 4.3 TB/s and operations / 790 TFLOP/s; kernels that are neither products nor attention have none.
Prompts are also timed whole, in turns, with as many tokens to a pass as each of ``--chunks`` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_wide import BANDWIDTH, LLAMA_8B, MODES, RATE, _pass, in_turns, inflated_weights  # pyright: ignore

from outrider.bench.provenance import keep_results
from outrider.bundled import bundled_path
from outrider.models.config import ModelConfig
from outrider.models.gpu.decoder import FastDecoder

PRODUCTS = ("qkv", "out", "gate and up", "down")
MADE_OF = ("wide_kernel", "product", "gemm", "cutlass", "nvjet", "xmma")
"""Parts of the names of kernels that multiply by a matrix."""


@dataclass(frozen=True)
class Kernel:
    """One launch in a trace, in microseconds."""

    name: str
    grid: tuple[int, ...]
    start: float
    length: float

    @property
    def is_product(self) -> bool:
        return any(part in self.name for part in MADE_OF)

    @property
    def is_attention(self) -> bool:
        return "attend" in self.name or "flash" in self.name or "sdpa" in self.name


def traced(call: Callable[[], None]) -> list[Kernel]:
    """The kernels of a call, in order."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    found = [
        Kernel(each["name"], tuple(each["args"].get("grid", ())), each["ts"], each["dur"])
        for each in events
        if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def layers_of(kernels: list[Kernel], num_layers: int) -> tuple[list[int], int]:
    """Where layers begin, and how many kernels a layer has. Raises where nothing repeats."""
    names = [kernel.name for kernel in kernels]
    for size in range(3, len(names) // max(1, num_layers - 2) + 1):
        for first in range(min(len(names), 4 * size)):
            if all(names[i] == names[i + size] for i in range(first, min(first + size * (num_layers - 3), len(names) - size))):
                pattern, begins, at = names[first : first + size], list[int](), first
                while at + size <= len(names):
                    fits = names[at : at + size] == pattern
                    begins += [at] if fits else []
                    at += size if fits else 1
                return begins, size
    raise ValueError("no kernels repeat from layer to layer")


def floors(config: ModelConfig, num_nodes: int, num_rows: int, context: int) -> dict[str, float]:
    """Microseconds at the device's full rates, by part of a layer. ``context`` tokens are read by each row."""
    size, heads, kept = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sides = ((heads + 2 * kept, size), (size, heads), (2 * config.mlp_size, size), (size, config.mlp_size))
    found = {
        name: max(2 * outputs * inputs / BANDWIDTH, 2 * outputs * inputs * num_nodes / RATE)
        for name, (outputs, inputs) in zip(PRODUCTS, sides, strict=True)
    }
    own = num_nodes / num_rows  # on average half of them are seen
    operations = 4 * num_nodes * (context + own / 2) * heads
    found["attention"] = max(4 * kept * num_rows * (context + own) / BANDWIDTH, operations / RATE)
    return {name: seconds * 1e6 for name, seconds in found.items()}


def table(kernels: list[Kernel], begins: list[int], size: int, known: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each kernel of a layer, and rows for all layers and for what is outside of them."""
    steps = [after.start - kernel.start for kernel, after in pairwise(kernels)] + [kernels[-1].length]
    layer, rows = kernels[begins[0] : begins[0] + size], list[dict[str, Any]]()
    products = iter(_starting_with_qkv(layer))
    for place, kernel in enumerate(layer):
        part = next(products) if kernel.is_product else "attention" if kernel.is_attention else ""
        mean, step = (
            sum(values[begin + place] for begin in begins) / len(begins)
            for values in ([each.length for each in kernels], steps)
        )
        rows.append(_row(kernel.name[:48], mean, step, part, known.get(part), kernel.grid))
    inside = sum(row["step_us"] for row in rows) * len(begins)
    whole = kernels[-1].start + kernels[-1].length - kernels[0].start
    rows.append(_row(f"{len(begins)} layers", inside, inside, floor=sum(known.values()) * len(begins)))
    return [*rows, _row("outside of them", whole - inside, whole - inside)]


def _row(
    name: str, length: float, step: float, part: str = "", floor: float | None = None, grid: tuple[int, ...] = ()
) -> dict[str, Any]:
    return {"kernel": name, "part": part, "grid": list(grid), "us": length, "step_us": step, "floor_us": floor}


def _starting_with_qkv(layer: list[Kernel]) -> list[str]:
    """The products of a layer in their order: the one before attention is that of queries, keys and values."""
    attends = next((place for place, kernel in enumerate(layer) if kernel.is_attention), 0)
    before = sum(kernel.is_product for kernel in layer[:attends])
    return [PRODUCTS[(place - before + 1) % len(PRODUCTS)] for place in range(sum(kernel.is_product for kernel in layer))]


def shown(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'part':<12}{'us':>10}{'step':>10}{'floor':>9}{'step / floor':>14}  {'grid':<18}kernel")
    for row in rows:
        floor = row["floor_us"]
        against = f"{floor:>9.1f}{row['step_us'] / floor:>14.2f}" if floor else " " * 23
        grid = "x".join(map(str, row["grid"]))
        print(f"{row['part']:<12}{row['us']:>10.1f}{row['step_us']:>10.1f}{against}  {grid:<18}{row['kernel']}", flush=True)


def reading(target: FastDecoder, num_tokens: int) -> Callable[[], None]:
    """A prompt read into a cache of its own."""
    prompt = [list(range(5, 5 + num_tokens))]

    def read() -> None:
        target.prefill(prompt, target.new_cache(1))

    return read


def prompt_times(target: FastDecoder, num_tokens: int, chunks: list[int], roofline: float) -> dict[str, Any]:
    """Median milliseconds by tokens of a pass."""

    def reading_by(chunk: int) -> Callable[[], None]:
        def read() -> None:
            target.chunk_len = chunk
            target.prefill([list(range(5, 5 + num_tokens))], target.new_cache(1))

        return read

    times = in_turns({str(chunk): reading_by(chunk) for chunk in chunks}, repeats=7)
    print(
        {chunk: f"{ms:.1f} ms, {ms / roofline:.2f}" for chunk, ms in times.items()}, f"roofline {roofline:.1f} ms", flush=True
    )
    return {"prompt": num_tokens, "roofline_ms": roofline, "ms_by_chunk": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", nargs="*", default=["32x3", "64x3", "64x5"], help="rows x nodes of each")
    parser.add_argument("--prompts", nargs="*", type=int, default=[2048, 8192], help="tokens")
    parser.add_argument("--chunks", nargs="*", type=int, default=[512, 1024, 2048, 4096], help="tokens of a prompt to a pass")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--numerics", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config, weights = inflated_weights(bundled_path("target"), LLAMA_8B, dtype=torch.bfloat16, device=torch.device("cuda"))
    read = sum(tensor.nbytes for tensor in weights.tensors) - weights.embedding.nbytes
    found = list[dict[str, Any]]()
    for mode in arguments.numerics:
        target = FastDecoder(config, weights, numerics=mode)
        shapes = [tuple(map(int, each.split("x"))) for each in arguments.passes]
        calls = {(rows, nodes): _pass(target, rows, nodes, arguments.context) for rows, nodes in shapes}
        calls |= {(1, count): reading(target, count) for count in arguments.prompts}
        for (num_rows, num_nodes), call in calls.items():
            is_prompt = num_rows == 1 and num_nodes in arguments.prompts
            kernels = traced(call)
            begins, size = layers_of(kernels, config.num_layers)
            num_passes = max(1, round(len(begins) / config.num_layers))
            own = num_nodes // num_passes  # of a prompt that is read in several passes, on average behind half of it
            context = (num_nodes - own) // 2 if is_prompt else arguments.context
            known = floors(config, num_rows * own, num_rows, context)
            rows = table(kernels, begins, size, known)
            title = f"{mode}: " + (f"a prompt of {num_nodes} tokens" if is_prompt else f"{num_rows} rows x {num_nodes} nodes")
            shown(f"{title}, {sum(known.values()):.0f} us a layer at full rates", rows)
            found.append({"numerics": mode, "rows": num_rows, "nodes": num_nodes, "context": context, "kernels": rows})
        for count in arguments.prompts if arguments.chunks else ():
            roofline = max(read / BANDWIDTH, read * count / RATE) * 1e3
            found.append({"numerics": mode, **prompt_times(target, count, arguments.chunks, roofline)})
    if arguments.json:
        what = "microseconds of each kernel of a layer of Llama-3-8B shapes, from a trace, next to its floor"
        keep_results(arguments.json, what, found, script="benchmarks/gpu_kernels.py")


if __name__ == "__main__":
    main()
