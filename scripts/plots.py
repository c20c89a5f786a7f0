"""Draw the plots of the documentation from measured results: ``python scripts/plots.py`` writes ``docs/images/speed.svg``.

A plot reads a file of ``benchmarks/results``, which names its command, machine, date and commit. No figure is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts")]
from diagrams import IMAGES, Picture  # noqa: E402  # pyright: ignore

RESULTS = ROOT / "benchmarks" / "results"
SHOWN = {
    "greedy": "greedy",
    "T 0.8, top-p 0.95": "temperature 0.8, top-p 0.95",
    "T 1, min-p 0.05": "temperature 1, min-p 0.05",
    "T 0.7, top-k 50, repetition 1.1": "temperature 0.7, top-k 50, repetition 1.1",
}
COLOURS = {"plain": "box", "draft-model": "root", "best-first": "good"}


def results(name: str) -> dict[str, Any]:
    """A file of measured results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def speed() -> Picture:
    """Tokens per second by sampler and method."""
    found = results("gpu_samplers")
    cells = {(row["sampler"], row["method"]): row["tokens_per_second"] for row in found["rows"]}
    scale, left, height = 560 / max(cells.values()), 130, 26
    picture = Picture(820, 70 + len(SHOWN) * (len(COLOURS) * height + 40) + 20, "Tokens per second, plain and speculative")
    machine = found["machine"].split(",")[0]
    picture.text(20, 34, f"Tokens per second at batch 1, Llama-3-8B shapes, {machine}", size=16, anchor="start")
    y = 56.0
    for sampler, words in SHOWN.items():
        picture.text(20, y + 14, words, anchor="start")
        y += 24
        for method, kind in COLOURS.items():
            value, base = cells[sampler, method], cells[sampler, "plain"]
            picture.text(left - 8, y + 16, method, kind="quiet", size=12, anchor="end")
            picture.box(left, y, value * scale, height - 5, kind=kind)
            more = "" if method == "plain" else f" ({value / base:.1f}x)"
            picture.text(left + value * scale + 8, y + 16, f"{value:.0f}{more}", size=12, anchor="start")
            y += height
        y += 16
    command = found["command"].split("python ")[1]
    picture.text(20, y + 10, f"{command}, {found['date']}", kind="quiet", size=12, anchor="start")
    return picture


PLOTS: dict[str, Callable[[], Picture]] = {"speed": speed}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, draw in PLOTS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
