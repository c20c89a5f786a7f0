"""Everything the pages say about GPUs, measured again: ``python scripts/gpu_figures.py --minutes 9 --out DIR`` on a device.

    python scripts/gpu_figures.py --dry-run             the plan: which call runs what, and for how long
    python scripts/gpu_figures.py --call 2 --out DIR    what belongs to the second call of nine minutes
    python scripts/gpu_figures.py --only gpu_wide prefill --out DIR
    python scripts/gpu_figures.py --unpack DIR/gpu_figures.json --out benchmarks/results

A measurement is a program of its own, in a process of its own with a time limit. They run in order of priority; one begins
only if the time that it is expected to take is left. ``DIR/gpu_figures.json`` has them all and is written after each: its
command, how it ended, the end of what it printed, and its results file, also of one that was stopped. Expected times are
estimates for an H200 that has compiled nothing yet. Needs Python, torch and triton, and installs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUNDLE = "gpu_figures.json"
CALL_MINUTES = 9.0
SLACK = 1.5
"""A measurement may take so many times what is expected."""
TAIL = 4000
"""Characters kept of what a measurement printed."""


@dataclass(frozen=True)
class Measurement:
    """One program."""

    name: str
    """The name of its results file, too."""
    command: str
    """Behind ``python``; ``{json}`` is the results file."""
    minutes: float
    """How long it is expected to take."""


def orders(name: str, more: str, minutes: float = 1.6) -> Measurement:
    """The default policy beside fixed settings; no further number of seats begins when half of the time is over."""
    return Measurement(name, f"benchmarks/policy_orders.py {more} --limit {30 * minutes:g} --json {{json}}", minutes)


SEATS = "--seats 1 8 32 64 128 --fixed 1 2 4"
PLAN = (
    Measurement(
        "tests",
        "-m pytest -q -p no:cacheprovider tests/gpu/test_fast_path_gpu.py tests/gpu/test_quantised_gpu.py "
        "tests/gpu/test_gguf_planes_gpu.py tests/gpu/test_few_bits_gpu.py tests/gpu/test_wide_gpu.py "
        "tests/gpu/test_samplers_gpu.py",
        2.5,
    ),
    orders("policy_orders_rising", f"{SEATS} --order rising"),
    orders("policy_orders_falling", f"{SEATS} --order falling"),
    orders("policy_orders_shuffled", f"{SEATS} --order shuffled"),
    orders("policy_orders_useless", "--seats 1 8 64 --useless --fixed 4", 1.2),
    orders("policy_orders_trees", "--method best-first --seats 1 --fixed 8 16 32 63", 1.2),
    Measurement(
        "serving_goodput",
        "benchmarks/serving_goodput.py --loops captured --batches 64 8 1 --fixed 2 4 --limit 90 --json {json}",
        2.0,
    ),
    Measurement(
        "serving_goodput_long",
        "benchmarks/serving_goodput.py --loops captured --prompt-tokens 1000 --batches 64 --repeats 1 --fixed 4 --json {json}",
        1.2,
    ),
    Measurement("gpu_wide", "benchmarks/gpu_wide.py --json {json}", 0.9),
    Measurement(
        "prefill",
        "benchmarks/gpu_kernels.py --passes 64x3 --prompts 2048 8192 --chunks 1024 2048 --numerics invariant --json {json}",
        1.1,
    ),
    Measurement("gpu_samplers", "benchmarks/gpu_samplers.py --tokens 64 --repeats 2 --json {json}", 1.8),
    Measurement("gpu_families", "benchmarks/gpu_families.py --json {json}", 2.4),
    Measurement("gpu_quantised", "benchmarks/gpu_quantised.py --repeats 3 --tokens 96 --json {json}", 2.6),
    Measurement("gpu_rows", "benchmarks/gpu_rows.py --rounds 1 --tokens 48 --json {json}", 3.8),
)
"""In order of priority."""


@dataclass(frozen=True)
class Outcome:
    """The result of a measurement."""

    name: str
    command: str
    seconds: float
    exit_status: int | None
    """None: it was stopped."""
    printed: str
    results: Any = None


Execute = Callable[[Measurement, float], Outcome]
"""Runs a measurement for at most so many seconds."""


def calls_of(plan: Sequence[Measurement], minutes: float) -> list[list[Measurement]]:
    """The plan in calls of so many minutes: each measurement is in the first that has room. One that fits into none has its
    own."""
    calls, left = list[list[Measurement]](), list[float]()
    for measurement in plan:
        place = next((number for number, room in enumerate(left) if measurement.minutes <= room), len(calls))
        if place == len(calls):
            calls.append([])
            left.append(minutes)
        calls[place].append(measurement)
        left[place] -= measurement.minutes
    return calls


def run(
    plan: Sequence[Measurement], minutes: float, execute: Execute, clock: Callable[[], float] = time.monotonic
) -> Iterator[Outcome]:
    """Outcomes in order of priority. What is expected to take longer than is left does not begin."""
    end = clock() + 60 * minutes
    for measurement in plan:
        left = end - clock()
        if 60 * measurement.minutes <= left:
            yield execute(measurement, min(left, SLACK * 60 * measurement.minutes))


def execute(measurement: Measurement, limit: float) -> Outcome:
    """The program in a process of its own, ended with all that it started when ``limit`` seconds are over."""
    with tempfile.TemporaryDirectory() as folder:
        results, printed = Path(folder) / "results.json", Path(folder) / "printed"
        words = [str(results) if word == "{json}" else word for word in measurement.command.split()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            status = _wait(process, limit)
        said = printed.read_text(errors="replace")[-TAIL:]
        return Outcome(measurement.name, measurement.command, round(time.monotonic() - began, 1), status, said, _read(results))


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _read(path: Path) -> Any:
    """A results file; None where there is none, or only part of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None


def unpack(bundle: Path, folder: Path) -> list[str]:
    """Write the results of a bundle as files; those of programs that failed are left out, and named."""
    failed = list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    for each in json.loads(bundle.read_text())["outcomes"]:
        if each["exit_status"] != 0:
            failed.append(each["name"])
        elif each["results"] is not None:
            (folder / f"{each['name']}.json").write_text(json.dumps(each["results"], indent=1) + "\n")
    return failed


def shown(calls: Sequence[Sequence[Measurement]]) -> str:
    """The plan in words."""
    lines = list[str]()
    for number, call in enumerate(calls, 1):
        lines.append(f"call {number}: {sum(each.minutes for each in call):.1f} minutes expected")
        lines += [f"  {each.minutes:4.1f}  {each.name:<24} python {each.command}" for each in call]
    return "\n".join(lines)


def chosen(names: Sequence[str]) -> list[Measurement]:
    """The measurements of these names, in order of priority; all without names."""
    unknown = set(names) - {each.name for each in PLAN}
    if unknown:
        raise SystemExit(f"no measurement is called {', '.join(sorted(unknown))}; use {', '.join(each.name for each in PLAN)}")
    return [each for each in PLAN if not names or each.name in names]


def measure(plan: Sequence[Measurement], minutes: float, folder: Path) -> int:
    """Run the plan and keep what comes of it; how many programs failed."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = list[Outcome]()
    for outcome in run(plan, minutes, execute):
        outcomes.append(outcome)
        there, how = outcome.results is not None, "stopped" if outcome.exit_status is None else f"exit {outcome.exit_status}"
        print(f"{outcome.name}: {how} after {outcome.seconds:.0f} s{'' if there else ', no results file'}", flush=True)
        done = {each.name for each in outcomes}
        left = [each.name for each in plan if each.name not in done]
        document = {"outcomes": [asdict(each) for each in outcomes], "left": left}
        (folder / BUNDLE).write_text(json.dumps(document, indent=1) + "\n")
    return sum(outcome.exit_status != 0 for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=CALL_MINUTES, help="minutes of this call (default: 9)")
    parser.add_argument("--call", type=int, help="the part of the plan that belongs to this call, from 1")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these measurements alone")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help=f"folder of {BUNDLE} (default: build/gpu)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help=f"write the results of a {BUNDLE} into --out")
    options = parser.parse_args()
    if options.unpack:
        print("failed:", ", ".join(unpack(options.unpack, options.out)) or "none")
        return
    calls = calls_of(chosen(options.only), options.minutes)
    if options.call is not None and not 1 <= options.call <= len(calls):
        raise SystemExit(f"--call {options.call}: the plan has {len(calls)} calls of {options.minutes:g} minutes")
    plan = chosen(options.only) if options.call is None else calls[options.call - 1]
    if options.dry_run:
        print(shown(calls if options.call is None else [plan]))
        return
    sys.exit(min(1, measure(plan, options.minutes, options.out)))


if __name__ == "__main__":
    main()
