"""How much faster ``outrider demo`` decodes than plain decoding on this machine, over several starts.

    PYTHONPATH=src python benchmarks/demo.py [--starts 7] [--max-tokens 120] [--out benchmarks/results/demo.json]

Every start is a process of its own, as for a user. It compares both sides in turns after a warm-up and reports the ratio of
their median speeds. The README quotes the file, so write it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from outrider.bench.provenance import keep_results
from outrider.cli.demo import demo_words


def compare_once(max_tokens: int) -> dict[str, Any]:
    """What one start reports."""
    command = [sys.executable, "-m", "outrider", *demo_words(max_tokens), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def row_of(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratios of all starts, and the medians of both speeds."""
    ratios = [start["speedup"] for start in starts]
    speeds = {side: statistics.median(start[side]["tokens_per_second"] for start in starts) for side in ("plain", "fast")}
    return {
        "method": starts[0]["method"], "starts": len(starts), "identical text": all(start["identical"] for start in starts),
        "least": min(ratios), "median": statistics.median(ratios), "most": max(ratios),
        "plain tokens/s": speeds["plain"], "fast tokens/s": speeds["fast"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [row_of([compare_once(arguments.max_tokens) for _ in range(arguments.starts)])]
    what = f"speed of outrider demo over plain decoding, {arguments.max_tokens} tokens"
    print(json.dumps(keep_results(arguments.out, what, rows, script="benchmarks/demo.py")))


if __name__ == "__main__":
    main()
