"""What passes cost on each instruction set of this machine: one process for each, in turns.

    python benchmarks/cpu_sets.py [MODEL ...] [--sets avx512_vnni avx2] [--prompts 128 800] [--before CHECKOUT] [--json FILE]

A MODEL is ``bundled``, one of those that cpu_models.py makes, a folder or a GGUF file. ``--types`` are those of folders,
``--file-types`` of files. A pass is a chain of nodes after a prompt of 128 tokens, on one thread, in CPU time. Prompts are
read into empty caches. ``--before`` names a checkout of another version, measured in turns with this one. The least of all
rounds is given.
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
from cpu import shown
from cpu_costs import NODES

Row = dict[str, Any]
CHILD = """
import json, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cpu import opened, own_row, path_of
from cpu_costs import Rates, pass_costs, prompt_costs
from outrider.models.native import ready_to_measure
torch.set_num_threads(1)
ready_to_measure()
path, repeats, lengths, types = path_of(sys.argv[2], Path("build/cpu")), int(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5:]
llms = {dtype: opened(path, dtype) for dtype in types}
targets = {dtype: llm.target for dtype, llm in llms.items()}
costs, prompts, rates = pass_costs(targets, repeats), prompt_costs(targets, lengths, repeats // 3 + 1), Rates.measured()
rows = {dtype: own_row(llm, dtype, costs[dtype], rates, prompt=128) for dtype, llm in llms.items()}
print(json.dumps({dtype: row | {"prompt_ms": prompts[dtype]} for dtype, row in rows.items()}))
"""


def measured(checkout: Path | None, isa: str, model: str, types: list[str], args: argparse.Namespace) -> dict[str, Row]:
    """What each type costs on a set, in another checkout if one is given."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), model, str(args.repeats), str(args.prompts), *types]
    environment = {**os.environ, "OUTRIDER_ISA": isa} | ({"PYTHONPATH": str(checkout / "src")} if checkout else {})
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def least(runs: list[Row], key: str) -> dict[int, float]:
    return {int(size): min(run[key][size] for run in runs) for size in runs[0][key]}


def row_of(version: str, isa: str, model: str, dtype: str, runs: list[Row]) -> Row:
    ms, floor = least(runs, "pass_ms"), least(runs, "floor_ms")
    return {
        "set": isa,
        **({"version": version} if version else {}),
        "model": Path(model).name,
        "weights": dtype,
        "matrices, MB": runs[0]["matrices_mb"],
        **{f"{nodes} nodes, ms": ms[nodes] for nodes in NODES},
        "16 over one": round(ms[16] / ms[1], 2),
        "floor of 1, 16, ms": [floor[1], floor[16]],
        **{f"prompt of {length}, ms": round(spent, 1) for length, spent in least(runs, "prompt_ms").items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=["bundled"])
    parser.add_argument("--sets", nargs="+", default=[isa.name for isa in sets_here()])
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16", "w8a8", "int4"])
    parser.add_argument("--file-types", nargs="+", default=["auto", "float32"])
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12, help="of every pass in a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    versions: dict[str, Path | None] = {"this": None, "before": args.before} if args.before else {"": None}
    runs: dict[tuple[str, str, str, str], list[Row]] = {}
    turns = [(model, isa, version) for model in args.model for isa in args.sets for version in versions] * args.rounds
    for model, isa, version in turns:
        types = args.file_types if model.endswith(".gguf") else args.types
        for dtype, row in measured(versions[version], isa, model, types, args).items():
            runs.setdefault((model, dtype, isa, version), []).append(row)
    what = "CPU milliseconds of passes on one thread, the least of all, one process for each instruction set, in turns"
    document = results_head(what, script="benchmarks/cpu_sets.py")
    document["command"] = shown(document["command"])
    document["rows"] = [row_of(version, isa, model, dtype, found) for (model, dtype, isa, version), found in runs.items()]
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
