"""Which tile reads each matrix of an 8B decoder fastest, at 8 to 64 rows: cuBLAS against ours (see models/gpu/tiles.py).

    PYTHONPATH=src python benchmarks/gpu_probe.py [--rows 8 64] [--json FILE]

Weights rotate through more memory than the cache holds; every figure is the median of graph replays, so launches cost what
they cost in use. The last line of stdout is one JSON document. Kernels are compiled in side processes first, which is most of
the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.gpu.skinny import Tile, product, reference_product
from outrider.models.gpu.tiles import Kind, tile_for

SHAPES: dict[str, tuple[Kind, int, int]] = {
    "qkv": (Kind.WIDE, 6144, 4096),
    "out": (Kind.NARROW, 4096, 4096),
    "gate_up": (Kind.GATED, 28672, 4096),
    "down": (Kind.NARROW, 4096, 14336),
    "head": (Kind.HEAD, 128256, 4096),
}
CUTS = (
    (16, 256, 4, 4), (32, 128, 4, 5), (32, 256, 4, 4), (64, 64, 4, 4), (64, 64, 4, 6), (64, 64, 4, 8), (64, 128, 4, 3),
    (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4),
)  # fmt: skip
BANDWIDTH = 4.3e12
WORKERS = 14


def candidates(kind: Kind, rows: int) -> list[Tile]:
    """Tiles worth trying."""
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64
    parts = (2, 4, 8) if kind is Kind.NARROW else (1,)
    return [Tile(*cut, bm, num_parts) for cut in CUTS for num_parts in parts]


def run(x: Tensor, weight: Tensor, tile: Tile, kind: Kind) -> Tensor:
    return product(x, weight, tile=tile, gated=kind is Kind.GATED, out_dtype=torch.float32 if kind is Kind.HEAD else None)


def microseconds(calls: list[Callable[[], Any]], *, repeats: int = 6) -> float:
    """Of one call, the median of graph replays over all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def compile_share(part: int, rows: list[int]) -> None:
    """Compile every so-many-th candidate into Triton's cache, on small matrices."""
    jobs = [(kind, count, tile) for kind in Kind for count in rows for tile in candidates(kind, count)]
    for kind, count, tile in islice(jobs, part, None, WORKERS):
        x = torch.randn(count, 4096, device="cuda").bfloat16()
        try:
            run(x, torch.randn(2048, 4096, device="cuda").bfloat16(), tile, kind)
        except Exception as error:  # too large for the device: the measurement will say so again
            print("cannot be compiled:", tile, str(error).splitlines()[0][:100])


def measure(name: str, rows: int) -> dict[str, Any]:
    """Every candidate of one matrix, and the relative error of the tile in use."""
    kind, outputs, depth = SHAPES[name]
    copies = max(2, min(8, 600_000_000 // (outputs * depth)))
    weights = [torch.empty(outputs, depth, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for _ in range(copies)]
    x = torch.randn(rows, depth, device="cuda").bfloat16()
    used = tile_for(kind, rows, outputs // 2 if kind is Kind.GATED else outputs)
    found: dict[str, float] = {"cuBLAS": microseconds([lambda w=w: F.linear(x, w) for w in weights])}
    for tile in [used, *candidates(kind, rows)]:
        try:
            found[str(tile)] = microseconds([lambda w=w, t=tile: run(x, w, t, kind) for w in weights])
        except Exception as error:
            print("cannot be run:", name, tile, str(error).splitlines()[0][:100])
    y = run(x, weights[0], used, kind).float()
    y = y.sum(0) if y.dim() == 3 else y
    expected = reference_product(x, weights[0], gated=kind is Kind.GATED)
    best = min((label for label in found if label != "cuBLAS"), key=found.__getitem__)
    error = float((y - expected).norm() / expected.norm())
    floor = outputs * depth * 2 / BANDWIDTH * 1e6
    print(
        f"{name:8} rows {rows:3}  floor {floor:6.1f}  cuBLAS {found['cuBLAS']:6.1f}  in use {found[str(used)]:6.1f}  "
        f"best {found[best]:6.1f} {best}  error {error:.1e}",
        flush=True,
    )
    return {"floor": floor, "error": error, "used": str(used), "microseconds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share is not None:
        compile_share(arguments.share, arguments.rows)
        return
    command = [sys.executable, __file__, "--rows", *map(str, arguments.rows), "--share"]
    for worker in [subprocess.Popen([*command, str(part)]) for part in range(WORKERS)]:
        worker.wait()
    table = {f"{name}/{rows}": measure(name, rows) for rows in arguments.rows for name in SHAPES}
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))
    print(json.dumps(table))


if __name__ == "__main__":
    main()
