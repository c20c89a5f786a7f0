"""What an aarch64 core can do in a second, and the least time that passes of 1 and 16 nodes take by it, type by type.

    python benchmarks/neon_rates.py [--json FILE]

Sixteen independent instructions of a kind are repeated on one thread, and the least CPU time of seven counts. A floor is the
larger of two times: bytes over the speed of a plain sum, and multiply-adds over the rate of the type's product. A type with
scales also spends two multiply-adds of floats on every 32 inputs of four outputs, three with offsets. Weights of bfloat16 and
of 8 bits are multiplied as floats. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from outrider.bench.provenance import keep_results

KINDS = {
    "float32 multiply-add": ("fmla v{i}.4s, v30.4s, v31.s[1]", 4),
    "float16 multiply-add": ("fmla v{i}.8h, v30.8h, v31.8h", 8),
    "8-bit dot product": ("sdot v{i}.4s, v30.16b, v31.4b[1]", 16),
    "whole numbers to floats": ("scvtf v{i}.4s, v30.4s", 0),
    "shift": ("shl v{i}.4s, v30.4s, 16", 0),
}
"""An instruction, and the multiply-adds it does."""
MODELS = {"bundled target": 12_058_624, "SmolLM2-135M": 134_479_872}
"""Weights that a pass multiplies with."""
TYPES = {"float32": (4.0, None), "bfloat16": (2.0, None), "int8": (1.0, None), "Q4_1": (0.625, 3), "Q8_0": (1.0625, 2)}
"""Bytes of a weight, and multiply-adds of floats for every 32 inputs of four outputs where whole numbers are multiplied."""
PROGRAM = """#include <cstdio>
#include <ctime>
static double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
int main() {
    const int count = 2000000;
    double least = 1e9;
    for (int run = 0; run < 7; run++) {
        const double began = now();
        for (int i = 0; i < count; i++) __asm__ volatile("%s" ::: %s);
        if (now() - began < least) least = now() - began;
    }
    printf("%%g", 16 * count / least);
}
"""


def rate(instruction: str) -> float:
    """How many of them a second."""
    lines = "".join(instruction.format(i=i) + r"\n" for i in range(16))
    registers = ", ".join(f'"v{i}"' for i in range(16))
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "rate.cpp"), Path(folder, "rate")
        source.write_text(PROGRAM % (lines, registers))
        command = ["g++", "-O2", "-march=armv8.2-a+dotprod+fp16", str(source), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return float(subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout)


def bytes_per_second() -> float:
    """Bytes per second that this thread reads from memory, beyond any cache."""
    numbers, least = torch.ones(1 << 26), float("inf")
    for _ in range(5):
        began = time.process_time()
        numbers.sum()
        least = min(least, time.process_time() - began)
    return numbers.nbytes / least


def floor_ms(weights: int, kind: str, nodes: int, rates: dict[str, float]) -> float:
    """The least time of a pass, by its products alone."""
    num_bytes, float_adds = TYPES[kind]
    if float_adds is None:
        work = nodes * weights / 4 / rates["float32 multiply-add"]
    else:
        dots, adds = nodes * weights / 16, float_adds * nodes * weights / 128
        work = dots / rates["8-bit dot product"] + adds / rates["float32 multiply-add"]
    return 1e3 * max(weights * num_bytes / rates["bytes"], work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates = {name: rate(instruction) for name, (instruction, _) in KINDS.items()}
    rates["bytes"] = bytes_per_second()
    rows: list[dict[str, Any]] = [
        {
            "what": name,
            "billions_a_second": round(rates[name] / 1e9, 2),
            "multiply_adds_billions": round(rates[name] * adds / 1e9, 1),
        }
        for name, (_, adds) in KINDS.items()
    ]
    rows.append({"what": "bytes read", "billions_a_second": round(rates["bytes"] / 1e9, 1)})
    for model, weights in MODELS.items():
        for kind in TYPES:
            floors = {nodes: round(floor_ms(weights, kind, nodes, rates), 2) for nodes in (1, 4, 16, 64)}
            rows.append({"model": model, "type": kind, "floor_ms": floors, "16_over_1": round(floors[16] / floors[1], 1)})
    what = "rates of one aarch64 core, and floors of passes by them"
    document = keep_results(args.json, what, rows, script="benchmarks/neon_rates.py")
    print(*map(json.dumps, rows), json.dumps(document), sep="\n")


if __name__ == "__main__":
    main()
