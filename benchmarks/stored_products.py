"""What products with stored matrices cost on each instruction set of this machine, alone: no model, nothing but a near cache.

    python benchmarks/stored_products.py [--sets avx512_vnni avx2] [--before FOLDER] [--rounds 3] [--json FILE]

A matrix of 576 outputs and 1,536 inputs of every type is multiplied with 1, 4, 16 and 64 rows, on one thread, in CPU time.
``--before`` names the folder ``models/native`` of another version, measured in turns. The least of all rounds is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from outrider.bench.provenance import results_head
from outrider.models.native import build
from outrider.models.native.compiler import FOLDER, find_compiler
from outrider.models.native.instruction_sets import sets_here

SOURCE = Path(__file__).with_suffix(".cpp")
Costs = dict[tuple[str, int], float]


def compiled(flags: tuple[str, ...], native: Path, path: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("there is no C++ compiler; install g++")
    command = [compiler, "-std=c++20", *build.FLAGS, *flags, f"-I{native}", str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def least(program: Path, known: Costs) -> Costs:
    """The costs of a run, where they are less than those known."""
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        name, rows, ms = line.split()
        key = name, int(rows)
        known[key] = min(float(ms), known.get(key, float("inf")))
    return known


def rows_of(isa: str, version: str, costs: Costs) -> list[dict[str, object]]:
    names = dict.fromkeys(name for name, _ in costs)
    counts = sorted({count for _, count in costs})
    return [
        {
            "set": isa,
            "version": version,
            "type": name,
            **{f"{count} rows, us": round(1e3 * costs[name, count], 1) for count in counts},
            "16 over one": round(costs[name, 16] / costs[name, 1], 2),
        }
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=[isa.name for isa in sets_here()])
    parser.add_argument("--before", type=Path, help="sources of another version, measured in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    versions = {"this": FOLDER} | ({} if args.before is None else {"before": args.before})
    costs: dict[tuple[str, str], Costs] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            (isa.name, version): compiled(isa.flags, native, Path(folder) / f"{isa.name}-{version}")
            for isa in sets_here()
            if isa.name in args.sets
            for version, native in versions.items()
        }
        for _ in range(args.rounds):
            for key, program in programs.items():
                costs[key] = least(program, costs.get(key, {}))
    what = "CPU microseconds of products with a stored matrix of 576 x 1,536 in a near cache, one thread, least of all runs"
    document = results_head(what, script="benchmarks/stored_products.py")
    document["rows"] = [row for (isa, version), found in costs.items() for row in rows_of(isa, version, found)]
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
