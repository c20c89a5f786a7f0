"""What one core can do in a second, and the least time that passes of 1, 4, 16 and 64 nodes take by it, type by type.

    python benchmarks/core_rates.py [--sets avx512_vnni avx2] [--json FILE]

Independent instructions of a kind are repeated on one thread, and the least CPU time of many short runs counts, since a
machine may be shared. A floor is the larger of two times: bytes over the speed of a plain sum, and the instructions of the
type's product over their rates. A type with scales multiplies whole numbers, 32 inputs at a time, and then adds them as floats:
two multiply-adds for a register of outputs, three with offsets. Sets without VNNI or its like add whole numbers in steps of
their own, which count. Unpacking and attention are left out. Weights of bfloat16 are multiplied as floats, or in pairs
where the set does so. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.bench.provenance import keep_results
from outrider.models.native.instruction_sets import sets_here

FLOAT, DOT, PAIRS = "float32 multiply-add", "8-bit product", "bfloat16 product in pairs"


@dataclass(frozen=True)
class Core:
    """The instructions of a set, of one register each."""

    flags: str
    outputs: int
    """Floats in a register."""
    registers: int
    kinds: dict[str, tuple[str, int]]
    """An instruction, and the multiply-adds it does."""
    products: dict[int, int]
    """Bits of a weight, and instructions of products of 8 bits, and of their sums, for a register of outputs and 32 inputs."""


_ZMM = {
    FLOAT: ("vfmadd231ps %zmm30, %zmm31, %zmm{i}", 16),
    DOT: ("vpdpbusd %zmm30, %zmm31, %zmm{i}", 64),
    "whole numbers to floats": ("vcvtdq2ps %zmm30, %zmm{i}", 0),
}
_ZMM_PAIRS = _ZMM | {PAIRS: ("vdpbf16ps %zmm30, %zmm31, %zmm{i}", 32)}
_ZMM_SHORT = _ZMM | {DOT: ("vpmaddubsw %zmm30, %zmm31, %zmm{i}", 64)}
_YMM = {
    FLOAT: ("vfmadd231ps %ymm14, %ymm15, %ymm{i}", 8),
    DOT: ("vpmaddubsw %ymm14, %ymm15, %ymm{i}", 32),
    "whole numbers to floats": ("vcvtdq2ps %ymm14, %ymm{i}", 0),
}
_NEON = {
    FLOAT: ("fmla v{i}.4s, v30.4s, v31.s[1]", 4),
    "float16 multiply-add": ("fmla v{i}.8h, v30.8h, v31.8h", 8),
    DOT: ("sdot v{i}.4s, v30.16b, v31.4b[1]", 16),
    "whole numbers to floats": ("scvtf v{i}.4s, v30.4s", 0),
    "shift": ("shl v{i}.4s, v30.4s, 16", 0),
}
_SHORT_SUMS = {4: 17, 8: 32}
"""Four bits: 8 products, 7 sums of 16 bits, which are widened and added once. Eight: each sign is moved, and each product is
widened and added."""
CORES = {
    "avx512_bf16": Core("-mavx512f -mavx512vnni -mavx512bf16", 16, 24, _ZMM_PAIRS, {4: 8, 8: 8}),
    "avx512_vnni": Core("-mavx512f -mavx512vnni", 16, 24, _ZMM, {4: 8, 8: 8}),
    "avx512": Core("-mavx512f -mavx512bw", 16, 24, _ZMM_SHORT, _SHORT_SUMS),
    "avx2": Core("-mavx2 -mfma", 8, 12, _YMM, _SHORT_SUMS),
    "neon_dot": Core("-march=armv8.2-a+dotprod+fp16", 4, 16, _NEON, {4: 8, 8: 8}),
}
MODELS = {"bundled target": 12_058_624, "SmolLM2-135M": 134_479_872}
"""Weights that a pass multiplies with."""
TYPES = {"float32": (4.0, 0, 0), "bfloat16": (2.0, 0, 0), "Q4_0": (0.5625, 4, 2), "Q4_1": (0.625, 4, 3), "Q8_0": (1.0625, 8, 2)}
"""Bytes of a weight; where whole numbers are multiplied, its bits and the multiply-adds of floats for 32 inputs."""
PROGRAM = """#include <cstdio>
#include <ctime>
static double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
int main() {
    const int count = 50000;
    double least = 1e9;
    for (int run = 0; run < 200; run++) {
        const double began = now();
        for (int i = 0; i < count; i++) __asm__ volatile("%s" ::: %s);
        if (now() - began < least) least = now() - began;
    }
    printf("%%g", %d * (double)count / least);
}
"""


def rate(core: Core, instruction: str) -> float:
    """How many of them a second."""
    lines = "".join(instruction.format(i=i).replace("%", "%%") + r"\n" for i in range(core.registers))
    stem = "v" if core.outputs == 4 else "xmm"
    registers = ", ".join(f'"{stem}{i}"' for i in range(core.registers))
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "rate.cpp"), Path(folder, "rate")
        source.write_text(PROGRAM % (lines, registers, core.registers))
        command = ["g++", "-O2", *core.flags.split(), str(source), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return float(subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout)


def bytes_per_second() -> float:
    """Bytes that one thread reads from memory in a second, beyond any cache."""
    numbers, least = torch.ones(1 << 26), float("inf")
    for _ in range(8):
        began = time.process_time()
        numbers.sum()
        least = min(least, time.process_time() - began)
    return numbers.nbytes / least


def floor_ms(core: Core, weights: int, kind: str, nodes: int, rates: dict[str, float]) -> float:
    """The least time of a pass, by its products alone."""
    num_bytes, bits, float_adds = TYPES[kind]
    registers = nodes * weights / core.outputs
    if bits:
        work = registers / 32 * (core.products[bits] / rates[DOT] + float_adds / rates[FLOAT])
    elif kind == "bfloat16" and PAIRS in rates:
        work = registers / 2 / rates[PAIRS]
    else:
        work = registers / rates[FLOAT]
    return 1e3 * max(weights * num_bytes / rates["bytes"], work)


def rows_of(name: str, core: Core, read: float) -> list[dict[str, Any]]:
    rates = {kind: rate(core, instruction) for kind, (instruction, _) in core.kinds.items()} | {"bytes": read}
    rows: list[dict[str, Any]] = [
        {
            "set": name,
            "what": kind,
            "billions_a_second": round(rates[kind] / 1e9, 2),
            "multiply_adds_billions": round(rates[kind] * adds / 1e9, 1),
        }
        for kind, (_, adds) in core.kinds.items()
    ]
    rows.append({"set": name, "what": "bytes read", "billions_a_second": round(read / 1e9, 1)})
    for model, weights in MODELS.items():
        for kind in TYPES:
            floors = {nodes: round(floor_ms(core, weights, kind, nodes, rates), 2) for nodes in (1, 4, 16, 64)}
            over = round(floors[16] / floors[1], 1)
            rows.append({"set": name, "model": model, "type": kind, "floor_ms": floors, "16_over_1": over})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [isa.name for isa in sets_here()]
    parser.add_argument("--sets", nargs="+", choices=CORES, default=[name for name in CORES if name in here])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    read = bytes_per_second()
    rows = [row for name in args.sets for row in rows_of(name, CORES[name], read)]
    what = "rates of one core, and floors of passes by them"
    document = keep_results(args.json, what, rows, script="benchmarks/core_rates.py")
    print(*map(json.dumps, rows), json.dumps(document), sep="\n")


if __name__ == "__main__":
    main()
