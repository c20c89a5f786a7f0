"""What passes cost on each instruction set of this machine: one process for each, in turns.

    python benchmarks/cpu_sets.py [MODEL ...] [--sets avx512_vnni avx2] [--rounds 2] [--json FILE]

A MODEL is ``bundled``, a folder or a GGUF file. ``--types`` are those of folders, ``--file-types`` of files. A pass
is a chain of nodes after a prompt of 128 tokens, on one thread, in CPU time. The least of all rounds is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from outrider.bench.provenance import results_head
from outrider.models.native.instruction_sets import sets_here

sys.path.insert(0, str(Path(__file__).parent))
from cpu_costs import NODES

Row = dict[str, Any]
CHILD = """
import json, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cpu import opened, own_row, path_of
from cpu_costs import Rates, pass_costs
from outrider.models.native import ready_to_measure
torch.set_num_threads(1)
ready_to_measure()
path, repeats, types = path_of(sys.argv[2], Path("build/cpu")), int(sys.argv[3]), sys.argv[4:]
llms = {dtype: opened(path, dtype) for dtype in types}
costs, rates = pass_costs({dtype: llm.target for dtype, llm in llms.items()}, repeats), Rates.measured()
print(json.dumps({dtype: own_row(llm, dtype, costs[dtype], rates, prompt=128) for dtype, llm in llms.items()}))
"""


def measured(isa: str, model: str, types: list[str], repeats: int) -> dict[str, Row]:
    """What each type costs on a set."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), model, str(repeats), *types]
    environment = {**os.environ, "OUTRIDER_ISA": isa}
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def least(runs: list[Row], key: str) -> dict[int, float]:
    return {nodes: min(run[key][str(nodes)] for run in runs) for nodes in NODES}


def row_of(isa: str, model: str, dtype: str, runs: list[Row]) -> Row:
    ms, floor = least(runs, "pass_ms"), least(runs, "floor_ms")
    return {
        "set": isa,
        "model": Path(model).name,
        "weights": dtype,
        "matrices, MB": runs[0]["matrices_mb"],
        **{f"{nodes} nodes, ms": ms[nodes] for nodes in NODES},
        "16 over one": round(ms[16] / ms[1], 2),
        "floor of 1, 16, ms": [floor[1], floor[16]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=["bundled"])
    parser.add_argument("--sets", nargs="+", default=[isa.name for isa in sets_here()])
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16", "w8a8", "int4"])
    parser.add_argument("--file-types", nargs="+", default=["auto", "float32"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12, help="of every pass in a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs: dict[tuple[str, str, str], list[Row]] = {}
    for _ in range(args.rounds):
        for model in args.model:
            for isa in args.sets:
                types = args.file_types if model.endswith(".gguf") else args.types
                for dtype, row in measured(isa, model, types, args.repeats).items():
                    runs.setdefault((model, dtype, isa), []).append(row)
    what = "CPU milliseconds of passes on one thread, the least of all, one process for each instruction set, in turns"
    document = results_head(what, script="benchmarks/cpu_sets.py")
    document["command"] = " ".join(Path(word).name if word.endswith(".gguf") else word for word in document["command"].split())
    document["rows"] = [row_of(isa, model, dtype, found) for (model, dtype, isa), found in runs.items()]
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
