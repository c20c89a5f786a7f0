"""Products with GGUF blocks as stored on a GPU: weights made as floats first, and codes multiplied first, beside the floor.

    PYTHONPATH=src python benchmarks/gpu_gguf.py [--forms Q4_K Q6_K Q8_0] [--json FILE]

Both kernels multiply the matrices of an 8B decoder (``planes_matmul.py``, ``planes_sums.py``). Copies of a matrix follow each
other in a CUDA graph, more of them than the cache holds. Figures are microseconds, medians of five. The floor is the bytes of
the matrix over 4.3 TB/s. Every product is compared with PyTorch's, in 32 bits, of the dequantised matrix.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu import BANDWIDTH
from gpu_quantised import LEAST, eight_bits, four_bits_in_steps
from torch import Tensor

from outrider.bench.provenance import keep_results
from outrider.models.gpu.finish import SILU, Finish
from outrider.models.gpu.planes_matmul import multiply_planes
from outrider.models.gpu.planes_sums import multiply_codes
from outrider.models.gpu.small_batch_matmul import reference_product
from outrider.models.gpu.tiles import Kind
from outrider.models.planes import Planes, together

MATRICES = {
    "qkv": (Kind.WIDE, 6144, 4096),
    "out": (Kind.NARROW, 4096, 4096),
    "down": (Kind.NARROW, 4096, 14336),
    "gate and up": (Kind.GATED, 28672, 4096),
    "head": (Kind.HEAD, 32768, 4096),
}
ROWS = (1, 8, 16, 32, 64)
HELD = 200 << 20
"""Bytes of all copies of a matrix."""
WHAT = "microseconds of a product with GGUF blocks as stored: weights first (planes_matmul.py), codes first (planes_sums.py)"


def six_bits(weight: Tensor) -> Planes:
    """Q6_K of GGUF: a step for 16, a float for 256."""
    groups = weight.float().unflatten(1, (-1, 16, 16))
    scales = (groups.abs().amax(-1) / 31).clamp_(min=LEAST)
    floats = (scales.amax(-1, keepdim=True) / 127).half()
    steps = (scales / floats.float()).round_().clamp_(1, 127)
    codes = (groups / (floats.float() * steps)[..., None]).round_().clamp_(-32, 31).flatten(1).add_(32).to(torch.uint8)
    whole = steps.flatten(1).to(torch.int8).T.contiguous()
    return Planes(together(codes & 15, 4), floats[..., 0].T.contiguous(), 32, together(codes >> 4, 2), whole)


FORMS: dict[str, Callable[[Tensor], Planes]] = {"Q4_K": four_bits_in_steps, "Q6_K": six_bits, "Q8_0": eight_bits}


def copies_of(weight: Planes) -> list[Planes]:
    """The matrix again and again, until the copies fill more than the cache."""
    count = max(2, min(16, HELD // weight.nbytes + 1))
    high = weight.high
    more = [replace(weight, low=weight.low.clone(), high=None if high is None else high.clone()) for _ in range(count - 1)]
    return [weight, *more]


def microseconds(multiply: Callable[[Planes], Tensor], copies: Sequence[Planes]) -> float:
    """Time of a product, in a graph of one with each copy."""
    for weight in copies[:2]:
        multiply(weight)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), list[float]()
    with torch.cuda.graph(graph):
        for weight in copies:
            multiply(weight)
    for _ in range(5):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * began.elapsed_time(ended) / len(copies))
    return median(times)


def measure(form: str, name: str) -> dict[str, Any]:
    """Both kernels on one matrix, at every number of rows."""
    kind, num_outputs, depth = MATRICES[name]
    draw = torch.Generator("cuda").manual_seed(1)
    weight = FORMS[form](torch.randn(num_outputs, depth, generator=draw, device="cuda").bfloat16() / 8)
    copies, gated = copies_of(weight), kind is Kind.GATED
    finish, dtype = SILU if gated else Finish("none"), torch.float32 if kind is Kind.HEAD else torch.bfloat16
    row: dict[str, Any] = {"form": form, "matrix": name, "floor": round(1e6 * weight.nbytes / BANDWIDTH, 1)}
    whole = weight.unpacked(torch.float32)
    for count in ROWS:
        x = torch.randn(count, depth, generator=draw, device="cuda").bfloat16()
        wanted = reference_product(x, whole, gated=gated)
        for way, kernel in (("weights first", multiply_planes), ("codes first", multiply_codes)):

            def product(one: Planes, kernel: Any = kernel, x: Tensor = x) -> Tensor:
                return kernel(x, one, kind, gated=gated, out_dtype=dtype, finish=finish)

            y = product(weight)
            y = (y.sum(0) if y.dim() == 3 else y).float()
            assert (y - wanted).norm() < 0.01 * wanted.norm(), f"{way} of {form}, {name}, {count} rows"
            row[f"{way}, {count} rows"] = round(microseconds(product, copies), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list[dict[str, Any]]()
    for form in arguments.forms:
        for name in MATRICES:
            rows.append(measure(form, name))
            print(json.dumps(rows[-1]), flush=True)
            keep_results(arguments.json, WHAT, rows, script="benchmarks/gpu_gguf.py")


if __name__ == "__main__":
    main()
