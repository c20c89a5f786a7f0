"""What 2, 4 and 8 H200s would give: a projection from the measured pieces of one, with a link that is assumed.

    python benchmarks/projected_devices.py [--link-latency 10] [--link-bandwidth 200] [--out FILE]

Measured are passes of Llama-3-8B shapes (`gpu_wide.json`, invariant numerics) and the kernels of a layer (`gpu_kernels.json`).
Nothing is timed here. A divided pass is projected between two bounds, and each adds two sums over devices for every layer.

    fast bound   all of a measured pass is divided, but for the two norms of a layer, which every rank computes whole
    slow bound   only the roofline of the pass is divided: all time beyond it stays what it is on one device

A sum takes the link's latency, and 2 (N - 1) / N of the states over its bandwidth. Both are assumptions: no machine with two
such devices was measured. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from outrider.bench.provenance import keep_results

RESULTS = Path(__file__).parent / "results"
LAYERS, HIDDEN = 32, 4096
SIZES = (2, 4, 8)
PASSES = ((1, 1), (1, 16), (8, 5), (64, 1), (64, 3))
CONTEXT = 512


def norms_ms() -> float:
    """Milliseconds of a pass in norms, from the trace of a pass of 64 rows with 3 nodes. Smaller passes need no more."""
    rows = json.loads((RESULTS / "gpu_kernels.json").read_text())["rows"]
    kernels = next(row["kernels"] for row in rows if row.get("rows") == 64)
    return LAYERS * sum(kernel["us"] for kernel in kernels if kernel["kernel"] == "_add_norm") / 1000


def projected(measured: dict[str, Any], size: int, sum_ms: float, norms: float) -> dict[str, Any]:
    """Both bounds of one pass on ``size`` devices."""
    whole, roofline = measured["invariant"], measured["roofline_ms"]
    sums = 2 * LAYERS * sum_ms
    fast, slow = (whole - norms) / size + norms + sums, roofline / size + (whole - roofline) + sums
    return {"ms_fast_bound": fast, "ms_slow_bound": slow, "times_faster": [round(whole / slow, 2), round(whole / fast, 2)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link-latency", type=float, default=10.0, help="microseconds of the smallest sum (assumed)")
    parser.add_argument("--link-bandwidth", type=float, default=200.0, help="GB/s of a device in sums (assumed)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    passes = json.loads((RESULTS / "gpu_wide.json").read_text())["rows"]
    norms, rows = norms_ms(), list[dict[str, Any]]()
    for count, nodes in PASSES:
        found = next(row for row in passes if (row["rows"], row["nodes"], row["context"]) == (count, nodes, CONTEXT))
        name = {"rows": count, "nodes": nodes}
        bare = {"ms_fast_bound": found["invariant"], "ms_slow_bound": found["invariant"], "times_faster": 1}
        rows.append({"devices": 1, "kind": "measured", **name, **bare})
        for size in SIZES:
            moved = 2 * (size - 1) / size * count * nodes * HIDDEN * 2
            sum_ms = arguments.link_latency / 1e3 + moved / (arguments.link_bandwidth * 1e6)
            rows.append({"devices": size, "kind": "projection", **name, **projected(found, size, sum_ms, norms)})
    link = f"{arguments.link_latency:g} microseconds and {arguments.link_bandwidth:g} GB/s a sum"
    what = f"milliseconds of a pass of Llama-3-8B shapes on H200s; more than one are a projection that assumes {link}"
    told = keep_results(arguments.out, what, rows, script="benchmarks/projected_devices.py")
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
