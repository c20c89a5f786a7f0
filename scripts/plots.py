"""Draw the plots of the documentation from measured results: ``python scripts/plots.py`` writes ``docs/images``.

A plot reads a file of ``benchmarks/results``, which names its command, machine, date and commit. No figure is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
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


def bars(name: str, title: str, shown: Sequence[tuple[str, float, str]], unit: str) -> Picture:
    """Bars of a results file: label, value and colour. The file's command and date stand below them."""
    found = results(name)
    picture = Picture(820, 90 + 28 * len(shown), title)
    picture.text(20, 34, title, size=16, anchor="start")
    scale = 420 / max(value for _, value, _ in shown)
    for row, (label, value, kind) in enumerate(shown):
        y = 54 + row * 28
        picture.text(272, y + 16, label.replace("*", ""), kind="quiet", size=12, anchor="end")  # no Markdown in a picture
        picture.box(280, y, value * scale, 21, kind=kind)
        picture.text(288 + value * scale, y + 16, f"{value:g}{unit}", size=12, anchor="start")
    command = f"{textwrap.shorten(found['command'], 90, placeholder=' ...')}, {found['date']}"
    picture.text(20, 74 + 28 * len(shown), command, kind="quiet", size=12, anchor="start")
    return picture


def batches() -> Picture:
    """Speed over plain decoding by batch size."""
    rows = results("gpu_batches")["rows"]
    shown = [(f"batch {row['batch']}", round(row["draft-model"] / row["plain"], 2), "good") for row in rows]
    return bars("gpu_batches", "Speed over plain decoding by batch size, Llama-3-8B shapes, H200", shown, "x")


def methods() -> Picture:
    """Tokens per second of each method at batch 1."""
    rows = [row for row in results("gpu_methods")["rows"] if "invariant" not in row["method"]]
    shown = [(row["method"], row["tokens/s"], "box" if row["method"] == "plain" else "good") for row in rows]
    return bars("gpu_methods", "Tokens per second at batch 1, greedy, Llama-3-8B shapes, H200", shown, "")


def engines() -> Picture:
    """Tokens per second of CPU engines: the fastest setting of each on the larger model."""
    rows = [row for row in results("cpu_engines")["rows"] if " over " not in row["engine"]]
    best = [(row["engine"].partition(":")[0].partition(" (")[0], max(map(float, str(row["mid"]).split("/")))) for row in rows]
    shown = [(name, value, "good" if name.startswith("ours") else "root") for name, value in best]
    return bars("cpu_engines", "Tokens per second on 2 CPU cores, 196M parameters: the fastest setting of each", shown, "")


PLOTS: dict[str, Callable[[], Picture]] = {"speed": speed, "batches": batches, "methods": methods, "engines": engines}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, draw in PLOTS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
