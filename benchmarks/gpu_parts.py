"""Attention of a tree's nodes behind a long context, on a GPU: one dense mask, two parts merged, and the decoder's own kernel.

    PYTHONPATH=src python benchmarks/gpu_parts.py [--json FILE] [--contexts 1024,8192,32768] [--nodes 32,64] [--batches 1,8]

Shapes of Llama-3-8B (32 query heads, 8 key heads of 128 numbers, bfloat16), one layer. *Dense*: PyTorch's attention with a mask
over context and tree; the mask is built beforehand. *Parts*: the context without a mask by a fused kernel, the tree with its
small one, merged by their log-sum-exps (``models/attention/parts.py``, LongSpec's hybrid tree attention). *Kernel*: the one
that captured rounds use. All three are replayed as graphs, in turns; the figure is the median.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.bench.provenance import keep_results
from outrider.core.tree import ancestors_of
from outrider.models.attention.parts import attend_part, merged

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5


def tree_of(nodes: int, batch: int, device: torch.device) -> Tensor:
    """[B, N, N] who is whose ancestor, in a binary tree."""
    parents = torch.tensor([[-1, *(max(0, (n - 1) // 2) for n in range(1, nodes))]])
    return ancestors_of(parents).expand(batch, -1, -1).to(device)


def ways(batch: int, nodes: int, context: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Each gives [B, heads, N, D] of the same queries, keys and values."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    queries = torch.randn(batch, HEADS, nodes, HEAD_DIM, device=device, dtype=dtype)
    capacity = -(-(context + nodes) // 256) * 256
    keys, values = (torch.randn(batch, KV_HEADS, capacity, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    seen, groups = tree_of(nodes, batch, device), HEADS // KV_HEADS
    far = keys[:, :, :context], values[:, :, :context]
    near = keys[:, :, context : context + nodes], values[:, :, context : context + nodes]
    bias = torch.zeros(batch, 1, groups, nodes, -(-(context + nodes) // 16) * 16, device=device, dtype=dtype)
    bias[..., context : context + nodes].masked_fill_(~seen[:, None, None], float("-inf"))
    mask = bias.flatten(2, 3)[..., : context + nodes]

    def dense() -> Tensor:
        folded, end = queries.reshape(batch, KV_HEADS, groups * nodes, HEAD_DIM), context + nodes
        found = F.scaled_dot_product_attention(folded, keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=SCALE)
        return found.reshape(queries.shape)

    def parts() -> Tensor:
        return merged(attend_part(queries, *far, scale=SCALE), attend_part(queries, *near, scale=SCALE, sight=seen))

    found = {"dense": dense, "parts": parts}
    return found | ({"kernel": kernel(queries, (keys, values), seen, context)} if device.type == "cuda" else {})


def kernel(queries: Tensor, memory: tuple[Tensor, Tensor], seen: Tensor, context: int) -> Callable[[], Tensor]:
    """The attention of captured rounds."""
    from outrider.models.attention.tree_cut import cut_for
    from outrider.models.attention.tree_tiles import Rows, Sights
    from outrider.models.attention.tree_triton import attend_tree, pack_words
    from outrider.models.gpu.limits import can_go_wide

    batch, nodes = len(queries), queries.shape[2]
    laid = queries.transpose(1, 2).contiguous()
    lengths = torch.full((batch,), context, dtype=torch.int32, device=queries.device)
    rows = Rows(lengths, torch.arange(batch, dtype=torch.int32, device=queries.device))
    wide, capacity = can_go_wide(HEAD_DIM, queries.dtype), memory[0].shape[2]
    size = nodes * HEADS // KV_HEADS
    cut = cut_for(batch, size, num_kv_heads=KV_HEADS, capacity=capacity, invariant=False, wide=wide)
    sights = Sights(pack_words(seen), None)
    return lambda: attend_tree(laid, memory, rows, sights=sights, cut=cut, scale=SCALE).transpose(1, 2)


def microseconds(calls: dict[str, Callable[[], Tensor]], *, rounds: int = 15, repeats: int = 20) -> dict[str, float]:
    """Microseconds of one call of each: the median over rounds in which all take turns."""
    graphs, times = {}, {name: list[float]() for name in calls}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(repeats):
                call()
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / repeats)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contexts", default="1024,4096,8192,16384,32768")
    parser.add_argument("--nodes", default="32,64")
    parser.add_argument("--batches", default="1,8")
    arguments = parser.parse_args()
    device, rows = torch.device("cuda" if torch.cuda.is_available() else "cpu"), list[dict[str, Any]]()
    contexts, nodes, batches = (list(map(int, vars(arguments)[name].split(","))) for name in ("contexts", "nodes", "batches"))
    for batch, count, context in ((b, n, c) for b in batches for n in nodes for c in contexts):
        calls = ways(batch, count, context, device)
        with torch.inference_mode():
            exact = calls["dense"]().float()
            far_off = {name: round(float((call().float() - exact).abs().max()), 5) for name, call in calls.items()}
            times = microseconds(calls) if device.type == "cuda" else {}
        rows.append({"batch": batch, "nodes": count, "context": context, "microseconds": times, "largest_difference": far_off})
        print(rows[-1], flush=True)
    if arguments.json:
        what = "attention of tree nodes behind a context, one layer of 8B shapes, bfloat16: dense mask, two parts, kernel"
        keep_results(arguments.json, what, rows, script="benchmarks/gpu_parts.py")


if __name__ == "__main__":
    main()
