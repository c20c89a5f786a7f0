"""Which tile reads each matrix of an 8B decoder fastest, and how attention is best cut, on the GPU at hand.

    PYTHONPATH=src python benchmarks/gpu_probe.py [--sections products attention] [--rows 8 64] [--bits 16 8 4] [--save]

Weights and keys rotate through more memory than the cache holds; every figure is the median of graph replays, so launches
cost what they cost in use. ``--save`` keeps the best choices where models/gpu/tuned.py finds them. The last line of stdout is
one JSON document. Kernels are compiled in side processes first, which is most of the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.tree import ancestors_of
from outrider.models.attention.tree_cut import cut_for
from outrider.models.attention.tree_tiles import KeySplit, Rows, Sights
from outrider.models.attention.tree_triton import attend_tree, pack_words
from outrider.models.gpu.limits import can_go_wide, can_ring, stages_that_fit
from outrider.models.gpu.small_batch_matmul import Tile, product, reference_product
from outrider.models.gpu.tiles import Kind, num_parts, tile_for
from outrider.models.gpu.tuned import cut_key, save, tile_key
from outrider.models.packed import Packed, pack

SHAPES: dict[str, tuple[Kind, int, int]] = {
    "qkv": (Kind.WIDE, 6144, 4096),
    "out": (Kind.NARROW, 4096, 4096),
    "gate_up": (Kind.GATED, 28672, 4096),
    "down": (Kind.NARROW, 4096, 14336),
    "head": (Kind.HEAD, 128256, 4096),
}
CUTS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: (
        (16, 256, 4, 4),
        (32, 128, 4, 5),
        (64, 64, 4, 3),
        (64, 64, 4, 8),
        (64, 128, 4, 3),
        (64, 128, 4, 6),
        (128, 64, 4, 4),
        (128, 64, 4, 6),
    ),
    8: (
        (32, 128, 4, 5),
        (32, 256, 4, 4),
        (64, 128, 4, 6),
        (128, 128, 8, 4),
    ),
    4: (
        (32, 128, 2, 6),
        (64, 128, 4, 4),
        (128, 128, 4, 6),
        (128, 128, 8, 6),
    ),
}
MANY = (64, 96, 128, 160, 192, 256, 288, 320, 384)
"""Rows of a program where more than 64 are multiplied."""
RINGS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    8: ((32, 128, 2, 4), (32, 256, 2, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 4)),
    4: ((32, 256, 2, 3), (64, 256, 4, 4), (64, 512, 4, 3), (64, 128, 4, 4), (128, 128, 4, 4), (128, 256, 8, 3)),
}
"""Outputs, inputs, warps and stages, where few bits can go through a ring (models/gpu/quantised_matmul.py)."""
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 32
PASSES = ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (16, 8192), (64, 1024), (64, 8192))
"""Nodes and context."""
ATTENTION = (
    *(
        KeySplit(1, block_queries=queries, block_keys=keys, num_warps=num_warps, num_stages=num_stages)
        for queries, keys, num_warps, num_stages in (
            (64, 64, 4, 3),
            (64, 128, 8, 2),
            (128, 64, 8, 3),
            (32, 64, 4, 3),
            (16, 64, 4, 3),
            (16, 128, 4, 3),
            (32, 128, 4, 2),
        )
    ),
    *(KeySplit(1, shortest=128, block_queries=128, num_stages=num_stages, side_by_side=True) for num_stages in (3, 4)),
)
"""How a program is cut; in how many pieces keys are is tried for each."""
PIECES = (4, 6, 8, 10, 12, 16, 24, 32)
BANDWIDTH = 4.3e12
WORKERS = 14


def candidates(kind: Kind, rows: int, bits: int) -> list[Tile]:
    """Tiles worth trying. The number of parts stays: results depend on it."""
    if rows > 64 and bits == 16:
        sides, parts = 2 if kind is Kind.GATED else 1, num_parts(kind, bits)
        cuts = [(bn, bm, stages_that_fit(6, (bn * sides + bm) * 128)) for bn in (64, 128) for bm in MANY if bm * sides <= 384]
        return [Tile(bn, 64, 4, stages, bm, parts, is_wide=True) for bn, bm, stages in cuts]
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if bits < 16 and ringed():
        bm = 8 if rows <= 8 else bm
        return [Tile(*cut, bm, num_parts(kind, bits), ringed=True) for cut in RINGS[bits] if not (bm == 64 and cut[1] == 512)]
    tiles = [Tile(*cut, bm, num_parts(kind, bits)) for cut in CUTS[bits]]
    return tiles + [replace(tile, copied=True) for tile in tiles] if bits == 16 else tiles


def ringed() -> bool:
    return can_ring(128, 128, torch.bfloat16)


def attention_cuts(num_queries: int) -> list[KeySplit]:
    wide = can_go_wide(HEAD_DIM, torch.bfloat16)
    cuts = [cut for cut in ATTENTION if wide or not cut.side_by_side]
    return [cut for cut in cuts if cut.block_queries <= max(16, num_queries) and (num_queries < 256 or cut.block_queries >= 64)]


def run(x: Tensor, weight: Tensor | Packed, tile: Tile, kind: Kind) -> Tensor:
    return product(x, weight, tile=tile, gated=kind is Kind.GATED, out_dtype=torch.float32 if kind is Kind.HEAD else None)


def microseconds(calls: Sequence[Callable[[], Any]], *, repeats: int = 6) -> float:
    """Microseconds of one call: the median of graph replays over all of them."""
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


def jobs(arguments: argparse.Namespace) -> list[Callable[[], Any]]:
    """Every kernel that will be measured, on small operands."""
    found: list[Callable[[], Any]] = []
    if "products" in arguments.sections:
        x = {rows: torch.randn(rows, 4096, device="cuda").bfloat16() for rows in arguments.rows}
        for bits in arguments.bits:
            weight = torch.randn(2048, 4096, device="cuda").bfloat16()
            small = weight if bits == 16 else pack(weight, bits)
            shapes = [(kind, rows, tile) for kind in Kind for rows in x for tile in candidates(kind, rows, bits)]
            found += [lambda k=k, r=r, t=t, w=small: run(x[r], w, t, k) for k, r, t in shapes]
    if "attention" in arguments.sections:
        for nodes, _ in PASSES:
            call = attention_calls(nodes, 256, layers=1)
            found += [
                lambda c=call, t=cut: c(replace(t, num_pieces=4))[0]() for cut in attention_cuts(nodes * HEADS // KV_HEADS)
            ]
    return found


def attention_calls(nodes: int, context: int, *, layers: int = LAYERS) -> Callable[[KeySplit], list[Callable[[], Any]]]:
    """Attention of all layers of a pass, by how it is cut."""
    shape = (1, KV_HEADS, -(-(context + nodes) // 256) * 256, HEAD_DIM)
    memory = [tuple(torch.randn(shape, device="cuda").bfloat16() for _ in range(2)) for _ in range(layers)]
    queries = torch.randn(1, nodes, HEADS, HEAD_DIM, device="cuda").bfloat16()
    lengths, places = (torch.tensor([value], dtype=torch.int32, device="cuda") for value in (context, 0))
    rows = Rows(lengths, places)
    parents = torch.tensor([[-1, *(max(0, n // 2 - 1) for n in range(1, nodes))]])
    sights = Sights(pack_words(ancestors_of(parents)).cuda() if nodes >= 16 else None, None)
    scale = HEAD_DIM**-0.5

    def calls(cut: KeySplit) -> list[Callable[[], Any]]:
        return [lambda m=m: attend_tree(queries, m, rows, sights=sights, cut=cut, scale=scale) for m in memory]  # type: ignore

    return calls


def attention(nodes: int, context: int) -> tuple[dict[str, float], KeySplit]:
    """Every way of cutting one pass, and the best."""
    calls, num_queries = attention_calls(nodes, context), nodes * HEADS // KV_HEADS
    wide = can_go_wide(HEAD_DIM, torch.bfloat16)
    used = cut_for(1, num_queries, num_kv_heads=KV_HEADS, capacity=context + nodes, invariant=False, wide=wide)
    found: dict[str, float] = {"in use": microseconds(calls(used))}
    cuts = [replace(cut, num_pieces=pieces) for cut in attention_cuts(num_queries) for pieces in PIECES]
    for cut in cuts:
        try:
            found[str(cut)] = microseconds(calls(cut), repeats=4)
        except Exception as error:
            print("cannot be run:", cut, str(error).splitlines()[0][:100])
    best = min((cut for cut in cuts if str(cut) in found), key=lambda cut: found[str(cut)])
    floor = 2 * KV_HEADS * (context + nodes) * HEAD_DIM * 2 / BANDWIDTH * 1e6
    print(f"attention {nodes:3} nodes, context {context}: floor {floor:.1f}, in use {found['in use']:.1f}, "
          f"best {found[str(best)]:.1f} {best}", flush=True)  # fmt: skip
    return found, best


def products(name: str, rows: int, bits: int) -> tuple[dict[str, Any], Tile]:
    """Every candidate of one matrix, and the relative error of the tile in use."""
    kind, outputs, depth = SHAPES[name]
    copies = max(2, min(8, 600_000_000 * 16 // bits // (outputs * depth)))
    dense = [torch.empty(outputs, depth, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for _ in range(copies)]
    weights: list[Tensor | Packed] = [w if bits == 16 else pack(w, bits) for w in dense]
    x = torch.randn(rows, depth, device="cuda").bfloat16()
    num_outputs = outputs // 2 if kind is Kind.GATED else outputs
    used = tile_for(kind, rows, num_outputs, bits=bits, ringed=bits < 16 and ringed())
    found: dict[str, float] = {label: microseconds(calls) for label, calls in theirs(x, dense, bits).items()}
    tiles = [used, *candidates(kind, rows, bits)]
    for tile in tiles:
        try:
            found[str(tile)] = microseconds([lambda w=w, t=tile: run(x, w, t, kind) for w in weights])
        except Exception as error:
            print("cannot be run:", name, tile, str(error).splitlines()[0][:100])
    y = run(x, weights[0], used, kind).float()
    y = y.sum(0) if y.dim() == 3 else y
    whole = weights[0] if isinstance(weights[0], Tensor) else weights[0].unpacked()
    expected = reference_product(x, whole, gated=kind is Kind.GATED)
    best = min((tile for tile in tiles if str(tile) in found), key=lambda tile: found[str(tile)])
    alike = same_bits(x, weights[0], tiles, kind)
    error, floor = float((y - expected).norm() / expected.norm()), weights[0].nbytes / BANDWIDTH * 1e6
    others = "  ".join(f"{label} {value:6.1f}" for label, value in found.items() if not label.startswith("Tile"))
    print(f"{name:8} {bits:2} bits, rows {rows:3}  floor {floor:6.1f}  {others}  in use {found[str(used)]:6.1f}  "
          f"best {found[str(best)]:6.1f} {best}  error {error:.1e}  same bits {alike}", flush=True)  # fmt: skip
    return {"floor": floor, "error": error, "used": str(used), "microseconds": found}, best


def same_bits(x: Tensor, weight: Tensor | Packed, tiles: Sequence[Tile], kind: Kind) -> bool:
    """Whether every tile gives the bits of the one in use."""
    expected = run(x, weight, tiles[0], kind)
    return all(torch.equal(run(x, weight, tile, kind), expected) for tile in tiles[1:])


def theirs(x: Tensor, dense: list[Tensor], bits: int) -> dict[str, list[Callable[[], Any]]]:
    """PyTorch's own products."""
    if bits == 16:
        return {"cuBLAS": [lambda w=w: F.linear(x, w) for w in dense]}
    try:
        if bits == 8:
            packed = [(pack(w, 8).data, torch.ones(len(w), device="cuda", dtype=torch.bfloat16)) for w in dense]
            calls = [lambda p=p: torch.ops.aten._weight_int8pack_mm(x, *p) for p in packed]
        else:
            nibbles = [torch.randint(0, 256, (len(w), w.shape[1] // 2), dtype=torch.uint8, device="cuda") for w in dense]
            tiled = [torch.ops.aten._convert_weight_to_int4pack(n, 8) for n in nibbles]
            scales = torch.ones(x.shape[1] // 128, len(dense[0]), 2, device="cuda", dtype=torch.bfloat16)
            calls = [lambda t=t: torch.ops.aten._weight_int4pack_mm(x, t, 128, scales) for t in tiled]
        calls[0]()
    except Exception as error:
        print("PyTorch's own product cannot be run:", str(error).splitlines()[0][:160])
        return {}
    return {"torch": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=("products", "attention"), default=("products", "attention"))
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--save", action="store_true", help="keep the best choices for the decoder to find")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share is not None:
        for job in islice(jobs(arguments), arguments.share, None, WORKERS):
            try:
                job()
            except Exception as error:  # too large for the device: the measurement will say so again
                print("cannot be compiled:", str(error).splitlines()[0][:100])
        return
    command = [sys.executable, *sys.argv, "--share"]
    for worker in [subprocess.Popen([*command, str(part)]) for part in range(WORKERS)]:
        worker.wait()
    table: dict[str, Any] = {}
    best: dict[str, dict[str, int]] = {}
    if "products" in arguments.sections:
        for bits, rows, name in ((bits, rows, name) for bits in arguments.bits for rows in arguments.rows for name in SHAPES):
            table[f"{name}/{rows}/{bits}"], tile = products(name, rows, bits)
            kind, outputs, _ = SHAPES[name]
            best[tile_key(kind.name, rows, outputs // 2 if kind is Kind.GATED else outputs, bits=bits)] = asdict(tile)
    if "attention" in arguments.sections:
        for nodes, context in PASSES:
            table[f"attention/{nodes}/{context}"], cut = attention(nodes, context)
            best[cut_key(1, nodes * HEADS // KV_HEADS, num_kv_heads=KV_HEADS, capacity=context + nodes)] = asdict(cut)
    if arguments.save:
        print("saved to", save(best))
    if arguments.json:
        arguments.json.write_text(json.dumps({"microseconds": table, "best": best}, indent=1))
    print(json.dumps({"best": best}))


if __name__ == "__main__":
    main()
