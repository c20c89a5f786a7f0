"""Where the time of the tests goes: ``python scripts/test_costs.py [PATH ...] [--jobs N] [--out FILE] [--coverage FILE]``.

The tests run as in ``make test``. A test's cost is the processor time of its worker until the next test begins. It includes
fixtures and child processes. Unlike seconds on the clock, it does not depend on what else the machine does.
The cost named ``(imports)`` is what a worker spends before its first test. A run of all tests writes its folders to
``benchmarks/results/test_costs.json``. ``--out`` names a file for the cost of every test. ``--coverage`` also counts the
lines that the workers reach and writes coverage's report in JSON. A run that is ended by ``--timeout`` keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "test_costs.json"
IMPORTS = "(imports)"
LINES = "lines"
"""The name of coverage's files in the folder of notes."""
Costs = dict[str, float]
"""Seconds by test."""

# --- inside a worker: a plugin of pytest ------------------------------------------------------------------------------------


class Meter:
    """Writes a line for every test, its name, its processor time and its time by the clock, and counts lines if asked to."""

    def __init__(self, folder: Path, worker: str, counts_lines: bool) -> None:
        self.path = folder / f"{worker}.jsonl"
        self.last, self.looked = 0.0, time.monotonic()
        self.kept = self.looked
        self.lines: Any = None
        if counts_lines:
            import coverage

            package = str(ROOT / "src" / "outrider")
            self.lines = coverage.Coverage(data_file=str(folder / LINES), data_suffix=True, source=[package])
            self.lines.start()

    def note(self, name: str) -> None:
        now, clock = spent(), time.monotonic()
        with self.path.open("a") as out:
            out.write(json.dumps([name, now - self.last, clock - self.looked]) + "\n")
        self.last, self.looked = now, clock

    def keep_lines(self, every: float) -> None:
        """Writes the lines that were counted, if that was last done ``every`` seconds ago."""
        if self.lines is not None and time.monotonic() - self.kept >= every:
            self.lines.save()
            self.kept = time.monotonic()

    def pytest_collection_finish(self) -> None:
        self.note(IMPORTS)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        done = yield
        self.note(item.nodeid)
        self.keep_lines(every=20)
        return done

    def pytest_sessionfinish(self) -> None:
        self.keep_lines(every=0)


def spent() -> float:
    """Processor seconds of this process and of its children, those that run included."""
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses) + sum(map(_spent_by, _children()))


def _children() -> list[str]:
    """Process numbers of the children that run, where the system tells."""
    return [child for task in Path("/proc/self/task").glob("*/children") for child in task.read_text().split()]


def _spent_by(process: str) -> float:
    """Processor seconds of a child and of its own children that have ended; 0 if it has just ended itself."""
    try:
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own in both modes, then theirs


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begins before a conftest imports the package. Processes that tests start are not workers."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and (folder := os.environ.pop("TEST_COSTS", None)) is not None:
        early_config.pluginmanager.register(Meter(Path(folder), worker, bool(os.environ.get("TEST_LINES"))))
        del os.environ["PYTEST_PLUGINS"]


# --- outside ----------------------------------------------------------------------------------------------------------------


def run_tests(paths: list[str], jobs: int, timeout: float, folder: Path, counts_lines: bool) -> bool:
    """Runs the tests with notes in ``folder``. True if they came to their end."""
    places = [str(ROOT / "src"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "TEST_COSTS": str(folder), "TEST_LINES": "1" if counts_lines else "", "OMP_NUM_THREADS": "1",
        "PYTEST_PLUGINS": "test_costs", "PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "--dist", "worksteal", "-p", "no:cacheprovider", *paths]
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as tests:
        try:
            return tests.wait(timeout) in (0, 1)
        except subprocess.TimeoutExpired:
            print(f"the tests ran for {timeout:.0f} s and were ended", file=sys.stderr, flush=True)
            os.killpg(tests.pid, signal.SIGKILL)
            return False


def read_costs(folder: Path) -> dict[str, Costs]:
    """The costs by file of tests. Those of imports have the name of their worker."""
    files: dict[str, Costs] = defaultdict(dict)
    for notes in sorted(folder.glob("*.jsonl")):
        for line in notes.read_text().splitlines():
            name, cost, *_ = json.loads(line)  # then the time by the clock
            path, _, test = name.partition("::")
            if test:
                files[path][test] = cost
            else:
                files[IMPORTS][notes.stem] = cost
    return files


def join_lines(folder: Path, report: Path, made: dict[str, Any]) -> None:
    """One report of the lines that all workers have reached, with where it comes from."""
    report.parent.mkdir(parents=True, exist_ok=True)
    for words in (["combine", "--quiet", str(folder)], ["json", "--quiet", "-o", str(report)]):
        data = f"--data-file={folder / LINES}"
        subprocess.run([sys.executable, "-m", "coverage", words[0], data, *words[1:]], cwd=ROOT, check=True)
    report.write_text(json.dumps({**json.loads(report.read_text()), "made": made}))


def rows(files: dict[str, Costs]) -> list[dict[str, Any]]:
    """A row for every folder of tests, the whole last."""
    tests, seconds = Counter[str](), defaultdict[str, float](float)
    for path in files.keys() - {IMPORTS}:
        for folder in (Path(path).parent.name, "all"):
            tests[folder] += len(files[path])
            seconds[folder] += sum(files[path].values())
    names = sorted(tests.keys() - {"all"})
    return [{"folder": name, "tests": tests[name], "processor_seconds": round(seconds[name], 1)} for name in [*names, "all"]]


def dearest(files: dict[str, Costs], count: int) -> Iterable[str]:
    """The files that cost most, and the tests whose variants cost most together."""
    by_file, by_test = defaultdict[str, float](float), defaultdict[str, float](float)
    for path, costs in files.items():
        for name, cost in costs.items():
            by_file[path] += cost
            by_test[f"{path}::{name.split('[')[0]}"] += cost
    for table in (by_file, by_test):
        order = sorted(table.items(), key=lambda entry: -entry[1])
        yield from (f"{seconds:8.1f} s  {name}" for name, seconds in order[:count])
        yield ""


def main() -> None:
    from outrider.bench.provenance import keep_results, results_head

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="workers (one a core)")
    parser.add_argument("--timeout", type=float, default=5400, help="seconds for the whole run (5400)")
    parser.add_argument("--show", type=int, default=40, help="files and tests to print (40)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the cost of every test")
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="count lines too, and where to write the report")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as notes:
        folder = Path(notes)
        whole = run_tests(arguments.paths, arguments.jobs, arguments.timeout, folder, arguments.coverage is not None)
        files = read_costs(folder)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(files, indent=1) + "\n")
        if arguments.coverage is not None:
            what = "lines of the package that the tests reach"
            join_lines(folder, arguments.coverage.resolve(), results_head(what, script="scripts/test_costs.py"))
    print("\n".join(dearest(files, arguments.show)))
    results = RESULTS if whole and not arguments.paths and arguments.coverage is None else None
    document = keep_results(results, "processor time of the tests", rows(files), script="scripts/test_costs.py")
    for row in document["rows"]:
        print(f"{row['folder']:10} {row['tests']:6} tests {row['processor_seconds']:9.1f} s")


if __name__ == "__main__":
    main()
