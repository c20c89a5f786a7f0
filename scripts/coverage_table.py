"""Lines that the tests reach, folder by folder, from the report of ``scripts/test_costs.py --coverage FILE``.

``python scripts/coverage_table.py FILE`` prints the shares and writes them to
``benchmarks/results/coverage.json``, from which ``scripts/tables.py`` fills the table in docs/checked.md.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"


def by_folder(report: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Name, reached lines and all lines of every folder of the package. A checkout may have the package's name itself."""
    reached, lines = Counter[str](), Counter[str]()
    for path, file in report["files"].items():
        parts = Path(path).parts
        inside = parts[len(parts) - parts[::-1].index("outrider") :]
        name = inside[0] if len(inside) > 1 else "(top)"
        reached[name] += file["summary"]["covered_lines"]
        lines[name] += file["summary"]["num_statements"]
    return [(name, reached[name], lines[name]) for name in sorted(lines)]


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for every folder, the whole last."""
    folders = by_folder(report)
    folders.append(("all", sum(row[1] for row in folders), sum(row[2] for row in folders)))
    return [{"folder": name, "lines": lines, "reached": f"{reached / max(1, lines):.1%}"} for name, reached, lines in folders]


def document(report: dict[str, Any]) -> dict[str, Any]:
    """The shares with where they come from, which the run that counted wrote into its report."""
    return {**report["made"], "rows": rows(report)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, metavar="FILE", help="the report of scripts/test_costs.py --coverage FILE")
    arguments = parser.parse_args()
    found = document(json.loads(arguments.report.read_text(encoding="utf-8")))
    for row in found["rows"]:
        print(f"{row['folder']:14} {row['lines']:7} {row['reached']:>7}")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
