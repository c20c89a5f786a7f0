"""Lines that the tests reach, folder by folder, from coverage's JSON report: ``python scripts/coverage_table.py FILE``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def by_folder(report: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Name, reached lines and all lines of every folder of the package."""
    reached, lines = Counter[str](), Counter[str]()
    for path, file in report["files"].items():
        parts = Path(path).parts
        inside = parts[parts.index("outrider") + 1 :]
        name = inside[0] if len(inside) > 1 else "(top)"
        reached[name] += file["summary"]["covered_lines"]
        lines[name] += file["summary"]["num_statements"]
    return [(name, reached[name], lines[name]) for name in sorted(lines)]


def table(report: dict[str, Any]) -> str:
    """The shares as a Markdown table, the whole last."""
    rows = by_folder(report)
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    cells = [f"| {name} | {lines} | {reached / max(1, lines):.1%} |" for name, reached, lines in rows]
    return "\n".join(["| folder | lines | reached |", "|---|---|---|", *cells])


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
