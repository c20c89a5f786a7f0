"""Where the time of the tests goes: ``python scripts/test_costs.py [PATH ...] [--jobs N] [--out FILE] [--coverage FILE]``.

Every test file runs in a process of its own. A test's cost is the processor time that passes until the next test begins. It
includes fixtures and child processes that have ended. Unlike seconds on the clock, it does not depend on what
else the machine does. The cost named ``(imports)`` is what a process spends before its first test, and ``make test`` spends
it once per core. A run of all tests writes its folders to ``benchmarks/results/test_costs.json``. ``--out`` names a file for
the cost of every test. ``--coverage`` also counts the lines that the tests reach and writes coverage's report in JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "test_costs.json"
IMPORTS = "(imports)"
Costs = dict[str, float]
"""Seconds by test."""

# --- inside a process of tests ------------------------------------------------------------------------------------------


class Meter:
    """A pytest plugin that writes a line for every test: its name and its processor time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = 0.0

    def note(self, name: str) -> None:
        now = spent()
        with self.path.open("a") as out:
            out.write(json.dumps([name, now - self.last]) + "\n")
        self.last = now

    def pytest_collection_finish(self) -> None:
        self.note(IMPORTS)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        done = yield
        self.note(item.nodeid)
        return done


def spent() -> float:
    """Processor seconds of this process and of its children that have ended."""
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter(Path(os.environ["TEST_COSTS"])))


# --- outside --------------------------------------------------------------------------------------------------------------


COUNTED = ["-m", "coverage", "run", "--parallel-mode", f"--source={ROOT / 'src' / 'outrider'}"]
"""What stands before ``-m pytest`` where lines are counted."""


def costs_of(path: Path, timeout: float, before: list[str]) -> Costs:
    """The costs of one test file. Those that were noted before a time-out count."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as notes:
        folders = [str(ROOT / "src"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "TEST_COSTS": notes.name, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
        command = [sys.executable, *before, "-m", "pytest", "-q", "-p", "test_costs", "-p", "no:cacheprovider", str(path)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
            if done.returncode not in (0, 5):
                print(done.stdout[-3000:], file=sys.stderr, flush=True)
        except subprocess.TimeoutExpired:
            print(f"{path} ran for {timeout:.0f} s and was ended", file=sys.stderr, flush=True)
        return dict(map(json.loads, Path(notes.name).read_text().splitlines()))


def join_counts(report: Path) -> None:
    """One report of the lines that all processes have reached."""
    report.parent.mkdir(parents=True, exist_ok=True)
    for words in (["combine", "--quiet"], ["json", "--quiet", "-o", str(report)]):
        subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT, check=True)


def rows(files: dict[str, Costs]) -> list[dict[str, Any]]:
    """A row for every folder of tests, the whole last."""
    tests, seconds = Counter[str](), Counter[str]()
    for path, costs in files.items():
        for folder in (Path(path).parent.name, "all"):
            tests[folder] += len(costs.keys() - {IMPORTS})
            seconds[folder] += sum(cost for name, cost in costs.items() if name != IMPORTS)  # type: ignore[assignment]
    names = sorted(tests.keys() - {"all"})
    return [{"folder": name, "tests": tests[name], "processor_seconds": round(seconds[name], 1)} for name in [*names, "all"]]


def dearest(files: dict[str, Costs], count: int) -> Iterable[str]:
    """The files that cost most, and the tests whose variants cost most together."""
    by_file = Counter({path: sum(costs.values()) - costs.get(IMPORTS, 0.0) for path, costs in files.items()})
    by_test = Counter[str]()
    for costs in files.values():
        for name, cost in costs.items():
            if name != IMPORTS:
                by_test[name.split("[")[0]] += cost  # type: ignore[assignment]
    for table in (by_file, by_test):
        yield from (f"{seconds:8.1f} s  {name}" for name, seconds in table.most_common(count))
        yield ""


def main() -> None:
    from outrider.bench.provenance import keep_results

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (all cores)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one file (1800)")
    parser.add_argument("--show", type=int, default=40, help="files and tests to print (40)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the cost of every test")
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="count lines too, and where to write the report")
    arguments = parser.parse_args()
    given = [path.resolve() for path in arguments.paths or [ROOT / "tests"]]
    found = [file for path in given for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        before = COUNTED if arguments.coverage else []
        files = dict(zip(names, pool.map(lambda path: costs_of(path, arguments.timeout, before), found), strict=True))
    if arguments.coverage is not None:
        join_counts(arguments.coverage.resolve())
    print("\n".join(dearest(files, arguments.show)))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(files, indent=1) + "\n")
    results, what = (
        None if arguments.paths or arguments.coverage else RESULTS,
        "processor time of the tests, one process a file",
    )
    whole = keep_results(results, what, rows(files), script="scripts/test_costs.py")
    for row in whole["rows"]:
        print(f"{row['folder']:10} {row['tests']:6} tests {row['processor_seconds']:9.1f} s")


if __name__ == "__main__":
    main()
