"""Does `outrider bench compare` report a slow-down planted in the code, and stay silent without one?

    python benchmarks/regression.py [--share 0.05] [--pairs 8] [--plants "unchanged,every round,drafting alone"]

Copies the package, and makes every round (or only drafting with a draft model) take ``--share`` longer. Then it benches the
unchanged copy, a second unchanged one and each slowed one in turns, ``--pairs`` times. The unchanged must agree; a slowed one
must be reported. Wants a quiet machine. The last line is one JSON document.
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
"""Where a busy wait goes in the engine's step: the line it stands before, its condition, and how many times the share it takes.
The share is of the time since the round began; a draft of four is about a third of a round."""
_FILE = "engine/step.py"
UNCHANGED = "unchanged"


def copy_of(folder: Path, plant: tuple[str, str, float] | None, share: float) -> Path:
    package = folder / "outrider"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "bundled"))
    (package / "bundled").symlink_to(SOURCE / "bundled")
    if plant is not None:
        line, guard, times = plant
        text = (package / _FILE).read_text()
        if line not in text:
            raise SystemExit(f"{_FILE} no longer holds {line!r}; bring the plant up to date")
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


def compared(folder: Path, old: str, new: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "outrider", "bench", "compare", old, new]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(folder)}, check=False, capture_output=True, text=True)
    print(done.stdout)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plants", default=",".join([UNCHANGED, *PLANTS]), help="which of them, with commas")
    arguments = parser.parse_args()
    options = [f"--{name}={vars(arguments)[name]}" for name in ("rounds", "prompts", "threads")]
    options.append(f"--max-tokens={arguments.tokens}")
    names = arguments.plants.split(",")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        copies = {"old": copy_of(root / "old", None, 0.0)}
        copies |= {label: copy_of(root / label.replace(" ", "-"), PLANTS.get(label), arguments.share) for label in names}
        for number in range(arguments.pairs):  # all of them in turns, so that partners are neighbours in time
            for label, folder in copies.items():
                bench(folder, root / f"{label}-{number}.json", options)
        results: dict[str, dict[str, list[str]]] = {}
        for label in names:
            print(f"--- {label}")
            sides = [",".join(str(root / f"{side}-{i}.json") for i in range(arguments.pairs)) for side in ("old", label)]
            results[label] = compared(copies["old"], *sides)
    right = all(bool(found["slower"]) is (label != UNCHANGED) for label, found in results.items())
    print(json.dumps({"share": arguments.share, "pairs": arguments.pairs, "right": right, **results}))


if __name__ == "__main__":
    main()
