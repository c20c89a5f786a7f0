"""Does `outrider bench compare` report a slow-down planted in the code, and stay silent without one?

    python benchmarks/regression.py [--share 0.05] [--rounds 9] [--seconds 45]

Copies the package, makes every round (or only drafting with a draft model) take ``--share`` longer, and benches the unchanged
copy twice and each slowed copy once. Two unchanged runs must agree; a slowed one must be reported. Wants a quiet machine: on
a busy one the intervals are wider than the slow-down. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "outrider"
_WAIT = """\
        mark = time.perf_counter()
        while {guard}time.perf_counter() - mark < {share} * (mark - began):
            pass
"""
PLANTS = {
    "every round": ("        return self._emit(batch, verdict, seen, began)", "", 1),
    "drafting alone": ("        scores = self.target.score(", "draft.tree.num_nodes > 1 and ", 3),
}
"""Where a busy wait goes in the engine's step: the line it stands before, its condition, and how many times the share it takes
(of the time since the round began: a draft of four is about a third of a round)."""
_FILE = "engine/step.py"


def copy_of(folder: Path, plant: str | None, share: float) -> Path:
    package = folder / "outrider"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "bundled"))
    (package / "bundled").symlink_to(SOURCE / "bundled")
    if plant is not None:
        line, guard, times = PLANTS[plant]
        text = (package / _FILE).read_text()
        if line not in text:
            raise SystemExit(f"{plant}: {_FILE} no longer holds {line!r}; bring the plant up to date")
        (package / _FILE).write_text(text.replace(line, _WAIT.format(guard=guard, share=times * share) + line, 1))
    return folder


def bench(folder: Path, out: Path, options: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "outrider",
        "bench",
        "--methods",
        "draft-model",
        "-K",
        "4",
        "--suites",
        "stories,extraction",
    ]
    command += ["--no-curves", "--quiet", "--json", str(out), *options]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(folder)}, check=True, stdout=subprocess.DEVNULL)


def compared(folder: Path, old: Path, new: Path) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "outrider", "bench", "compare", str(old), str(new)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(folder)}, check=False, capture_output=True, text=True)
    print(done.stdout)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=45)
    arguments = parser.parse_args()
    options = ["--rounds", str(arguments.rounds), "-n", str(arguments.tokens), "--threads", str(arguments.threads)]
    options += ["--seconds", str(arguments.seconds)]
    results: dict[str, dict[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        clean = copy_of(root / "clean", None, 0.0)
        bench(clean, root / "first.json", options)
        for label in (None, *PLANTS):
            slowed = clean if label is None else copy_of(root / label.replace(" ", "-"), label, arguments.share)
            bench(slowed, root / "next.json", options)
            print(f"--- {label or 'unchanged'}")
            results[label or "unchanged"] = compared(clean, root / "first.json", root / "next.json")
    right = not results["unchanged"]["slower"] and all(results[label]["slower"] for label in PLANTS)
    print(json.dumps({"share": arguments.share, "right": right, **results}))


if __name__ == "__main__":
    main()
