"""Wide passes of an 8B decoder, as a busy server runs them, against the roofline, in both numerics and in turns.

    PYTHONPATH=src python benchmarks/gpu_wide.py [--passes 32x3 64x3] [--context 512] [--json FILE]

A pass is rows x nodes of each row. Its roofline is the larger of the time to read the weights (4.3 TB/s) and the time to
multiply (16 GFLOP a node at 790 TFLOP/s). ``--profile`` prints where the time of each pass goes, by kernel.
The weights are those of the bundled target, inflated to Llama-3-8B's shapes (recipes/inflate.py). The last line of stdout is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "recipes")]
from inflate import LLAMA_8B, inflated_weights  # noqa: E402  # pyright: ignore

from outrider.bench.provenance import results_head  # noqa: E402
from outrider.bundled import bundled_path  # noqa: E402
from outrider.models.attention.tree_tiles import Sights  # noqa: E402
from outrider.models.gpu.decoder import FastDecoder  # noqa: E402
from outrider.models.gpu.pages import flat_rows, rows_in  # noqa: E402

BANDWIDTH, RATE = 4.3e12, 790e12
MODES = ("fast", "invariant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["1x1", "1x16", "1x64", "8x5", "32x1", "64x1", "32x3", "64x2", "64x3", "64x5", "64x9", "64x16", "1x512"]
    parser.add_argument("--passes", nargs="+", default=default, help="rows x nodes of each")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, each.split("x"))) for each in arguments.passes]
    config, weights = inflated_weights(bundled_path("target"), LLAMA_8B, dtype=torch.bfloat16, device=torch.device("cuda"))
    read = sum(tensor.nbytes for tensor in weights.tensors) - weights.embedding.nbytes
    targets = {mode: FastDecoder(config, weights, numerics=mode) for mode in MODES}
    found: list[dict[str, Any]] = []
    print(f"{'rows x nodes':>14}{'fast':>9}{'invariant':>11}{'roofline':>10}{'fast':>8}{'invariant':>11}{'inv / fast':>12}")
    for num_rows, num_nodes in shapes:
        calls = {mode: _pass(target, num_rows, num_nodes, arguments.context) for mode, target in targets.items()}
        times = in_turns(calls)
        floor = max(read / BANDWIDTH, 2 * read / 2 * num_rows * num_nodes / RATE) * 1e3
        fast, invariant = (times[mode] for mode in MODES)
        print(f"{f'{num_rows} x {num_nodes}':>14}{fast:>9.3f}{invariant:>11.3f}{floor:>10.3f}"
              f"{fast / floor:>8.2f}{invariant / floor:>11.2f}{invariant / fast:>12.3f}", flush=True)  # fmt: skip
        found.append({"rows": num_rows, "nodes": num_nodes, "context": arguments.context, "roofline_ms": floor, **times})
        if arguments.profile:
            for mode, call in calls.items():
                profile(mode, call)
    what = "milliseconds of a captured pass of Llama-3-8B shapes, medians in turns"
    result = results_head(what, script="benchmarks/gpu_wide.py") | {"rows": found}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


@torch.inference_mode()
def _pass(target: FastDecoder, num_rows: int, num_nodes: int, context: int) -> Callable[[], None]:
    """A captured pass over chains of ``num_nodes`` behind ``context`` tokens each."""
    cache, num_slots = target.new_cache(num_rows), context + max(64, num_nodes)
    cache.extend(num_slots)
    cache.lengths = [context] * num_rows
    step = target.step(
        (num_rows, num_nodes),
        rows_in(flat_rows(cache, max(map(len, cache.pages))).to(target.device), cache.batch_size, target.pool.page_len),
        Sights(None, None, 0, None),
        num_slots=target.num_slots,
    )
    tokens = torch.arange(5, 5 + num_rows * num_nodes, device="cuda").view(num_rows, num_nodes)
    target.forward(tokens, step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.forward(tokens, step)
    held = (cache, step, tokens)  # the graph has their addresses
    return lambda: graph.replay() if held else None


def in_turns(calls: dict[str, Callable[[], None]], repeats: int = 15) -> dict[str, float]:
    """Median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in times.items()}


def profile(mode: str, call: Callable[[], None]) -> None:
    """The ten kernels that take longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda each: -each.device_time_total)[:10]:
        print(f"    {mode:<10}{event.device_time_total / 1e3:>8.3f} ms {event.count:>5} x  {event.key[:90]}")


if __name__ == "__main__":
    main()
