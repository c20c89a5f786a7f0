"""Which tile reads each matrix of an 8B decoder fastest, at 1 to 64 rows: cuBLAS against our kernels, then whole chains of products.

    PYTHONPATH=src python benchmarks/gpu_probe.py [--rows 1 8 64] [--json FILE]

Weights rotate through more memory than the cache holds; every figure is a graph replay, so launches cost what they cost in use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.gpu.skinny import Norm, Tile, product, reference_product, vector_product

SHAPES: dict[str, tuple[int, int]] = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
VECTOR = [
    Tile(bn, bk, warps, stages)
    for bn, bk, warps, stages in (
        (4, 1024, 4, 1), (8, 512, 4, 1), (8, 1024, 8, 1), (16, 256, 4, 1), (4, 2048, 8, 1), (16, 512, 8, 1), (2, 2048, 4, 1),
        (8, 512, 4, 3), (4, 1024, 4, 3), (8, 1024, 8, 3), (1, 4096, 4, 1), (2, 1024, 2, 3), (32, 128, 4, 3), (16, 256, 4, 3),
    )
]  # fmt: skip
MATRIX = [
    (16, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 5), (32, 256, 4, 3), (32, 256, 4, 4), (64, 128, 4, 4), (64, 64, 4, 6),
    (128, 64, 4, 4), (64, 128, 4, 3), (16, 128, 4, 6), (64, 256, 4, 2), (32, 512, 8, 2),
]  # fmt: skip


def seconds_of(calls: list[Callable[[], Any]], *, replays: int = 6) -> float:
    """Median seconds of one pass over the calls, replayed as a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:1]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times: list[float] = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


class Case:
    """One matrix with what stands around it."""

    def __init__(self, name: str) -> None:
        self.name = name
        outputs, depth = SHAPES[name]
        copies = max(2, min(8, 600_000_000 // (outputs * depth)))
        self.weights = [
            torch.empty(outputs, depth, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for _ in range(copies)
        ]
        self.gated = name == "gate_up"
        self.norm = (
            Norm(torch.ones(depth, dtype=torch.bfloat16, device="cuda"), 1e-5) if name in ("qkv", "gate_up", "head") else None
        )
        self.has_residual = name in ("out", "down")
        self.out_dtype = torch.float32 if name == "head" else torch.bfloat16

    def inputs(self, rows: int) -> tuple[Tensor, Tensor | None]:
        outputs, depth = SHAPES[self.name]
        x = torch.randn(rows, depth, device="cuda").bfloat16()
        return x, torch.randn(rows, outputs, device="cuda").bfloat16() if self.has_residual else None

    def call(self, x: Tensor, residual: Tensor | None, weight: Tensor, tile: Tile, *, vector: bool, fused: bool) -> Tensor:
        run = vector_product if vector else product
        norm = self.norm if fused else None
        return run(x, weight, tile=tile, norm=norm, residual=residual, gated=self.gated, out_dtype=self.out_dtype)

    def error(self, rows: int, tile: Tile, *, vector: bool, fused: bool) -> float:
        x, residual = self.inputs(rows)
        norm = self.norm if fused else None
        expected = reference_product(x, self.weights[0][: 2048 if not self.gated else None], norm=norm, gated=self.gated,
                                     residual=None if residual is None else residual[:, :2048])  # fmt: skip
        got = self.call(x, residual, self.weights[0], tile, vector=vector, fused=fused)[:, : expected.shape[1]].float()
        return float((got - expected).norm() / expected.norm())

    def seconds(self, rows: int, tile: Tile | None, *, vector: bool = False, fused: bool = True) -> float:
        x, residual = self.inputs(rows)
        if tile is None:
            calls = [lambda w=w: F.linear(x, w) for w in self.weights]
        else:
            calls = [lambda w=w: self.call(x, residual, w, tile, vector=vector, fused=fused) for w in self.weights]
        return seconds_of(calls) / len(calls)


def candidates(rows: int) -> list[tuple[str, Tile, bool, bool]]:
    """(label, tile, vector, norm inside)"""
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = [Tile(bn, bk, warps, stages, bm) for bn, bk, warps, stages in MATRIX]
    found = [(f"m{bm} {t.bn}x{t.bk} w{t.num_warps} s{t.num_stages}", t, False, True) for t in tiles]
    found += [(f"m{bm} {t.bn}x{t.bk} w{t.num_warps} s{t.num_stages} bare", t, False, False) for t in tiles if rows > 1]
    if rows == 1:
        found += [(f"v {t.bn}x{t.bk} w{t.num_warps} s{t.num_stages}", t, True, True) for t in VECTOR]
    return found


def compile_share(part: int, parts: int, rows: list[int]) -> None:
    """Compile every parts-th candidate into Triton's cache."""
    jobs = [
        (name, rows_, *candidate)
        for rows_ in rows
        for name in ("qkv", "out", "gate_up", "head")
        for candidate in candidates(rows_)
    ]
    cases: dict[str, Case] = {}
    for name, rows_, _, tile, vector, fused in itertools.islice(jobs, part, None, parts):
        SHAPES[name] = (1024, 4096) if name != "gate_up" else (2048, 4096)
        case = cases.setdefault(name, Case(name))
        try:
            x, residual = case.inputs(rows_)
            case.call(x, residual, case.weights[0], tile, vector=vector, fused=fused)
        except Exception as error:
            print("compile", name, tile, str(error)[:200])


def chain(cases: dict[str, Case], best: dict[str, tuple[Tile, bool]], rows: int, *, early: int, fused: bool) -> float:
    """Seconds of eight layers of products, each reading what the one before wrote."""
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    keep: list[Tensor] = []

    def tile_of(name: str) -> tuple[Tile, bool]:
        tile, vector = best[name]
        return Tile(tile.bn, tile.bk, tile.num_warps, tile.num_stages, tile.bm, early), vector

    def layer(index: int) -> None:
        def run(name: str, value: Tensor, residual: Tensor | None) -> Tensor:
            tile, vector = tile_of(name)
            weights = cases[name].weights
            return cases[name].call(value, residual, weights[index % len(weights)], tile, vector=vector, fused=fused)

        qkv = run("qkv", x, None)
        seen = qkv[:, :4096] if rows == 1 else qkv.view(-1)[: rows * 4096].view(rows, 4096)
        run("out", seen, x)
        gated = run("gate_up", x, None)
        run("down", gated, x)
        keep.extend((qkv, gated))

    return seconds_of([lambda i=i: layer(i) for i in range(8)]) / 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", type=int, nargs=2)
    arguments = parser.parse_args()
    if arguments.share:
        compile_share(*arguments.share, arguments.rows)
        return
    began = time.time()
    workers = [
        subprocess.Popen([sys.executable, __file__, "--share", str(i), "14", "--rows", *map(str, arguments.rows)])
        for i in range(14)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    cases = {name: Case(name) for name in SHAPES}
    table: dict[str, Any] = {}
    for rows in arguments.rows:
        best: dict[str, tuple[Tile, bool]] = {}
        best_bare: dict[str, tuple[Tile, bool]] = {}
        for name, case in cases.items():
            outputs, depth = SHAPES[name]
            floor = outputs * depth * 2 / 4.3e12
            results = {"cublas": case.seconds(rows, None)}
            chosen: dict[str, tuple[Tile, bool, bool]] = {}
            for label, tile, vector, fused in candidates(rows):
                try:
                    results[label] = case.seconds(rows, tile, vector=vector, fused=fused)
                    chosen[label] = (tile, vector, fused)
                except Exception as error:
                    print("skip", name, label, str(error)[:120].replace("\n", " "))
            order = sorted(results, key=results.__getitem__)
            table[f"{name}/{rows}"] = {label: results[label] * 1e6 for label in order}
            ours = next(label for label in order if label in chosen and chosen[label][2])
            best[name] = chosen[ours][:2]
            bare = next((label for label in order if label in chosen and not chosen[label][2]), ours)
            best_bare[name] = chosen[bare][:2]
            error = case.error(rows, chosen[ours][0], vector=chosen[ours][1], fused=chosen[ours][2])
            top = "  ".join(f"{label} {results[label] * 1e6:.1f}" for label in order[:4])
            print(
                f"{name:8} rows {rows:3} floor {floor * 1e6:6.1f}  cublas {results['cublas'] * 1e6:6.1f} | {top} | {ours} err {error:.1e} | {bare} {results[bare] * 1e6:.1f}",
                flush=True,
            )
        for label, tiles, fused in (("norm inside", best, True), ("bare", best_bare, False)):
            for early in (-1, 0, 256, 1024):
                try:
                    took = chain(cases, tiles, rows, early=early, fused=fused)
                    table[f"chain/{rows}/{label}/{early}"] = took * 1e6
                    print(
                        f"chain of 8 layers, rows {rows}, {label}, early {early}: {took * 1e6:.1f} us a layer (floor 101.4), x32 = {took * 32e3:.3f} ms",
                        flush=True,
                    )
                except Exception as error:
                    print("chain", label, early, str(error)[:300])
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
