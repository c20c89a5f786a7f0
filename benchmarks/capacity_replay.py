"""The capacity model against a replay of arrivals: how many replicas it plans, and how many hold.

    python benchmarks/capacity_replay.py [--rate 100] [--seconds 240] [--out FILE]

Replicas are projections: an 8B target with a 1B draft on one H100, rows at most 32, acceptance 0.8 at every depth, from the
roofline of `outrider simulate`. Traces are made from published statistics (`src/outrider/bench/replay.py`). A fleet holds where
99 of 100 requests wait less than a second before their prompt is read. For each service, burstiness and way of decoding: the
replicas that the capacity model plans at a utilisation of 0.7, their wait, and the fewest that hold, over --seeds traces.
Everything is computed, nothing is timed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from outrider.bench.capacity import Capacity
from outrider.bench.replay import WORKLOADS, Speeds, Workload, fewest, make_trace, replay
from outrider.bench.simulate import Cluster, Scenario, Shape, hardware_named

_ROWS = 32
_RATES = (0.8,)
_CHUNK = 512
"""Tokens of a prompt that are read in one pass."""


def speeds_of(*, speculate: bool, context: int) -> Speeds:
    target, draft = Shape(8e9, 32, 131072), Shape(1e9, 16)
    cluster = Cluster(hardware_named("h100"))

    @cache
    def tokens(rows: int) -> float:
        scenario = Scenario(target, draft, cluster, batch_size=rows, context=context)
        return scenario.speed(scenario.best_length(_RATES) if speculate else 0, _RATES)

    return Speeds(tokens, _CHUNK / cluster.pass_seconds(target, _CHUNK, batch_size=1, context=context), _ROWS)


def compared(workload: Workload, *, speculate: bool, cv: float, arguments: argparse.Namespace) -> dict[str, Any]:
    speeds = speeds_of(speculate=speculate, context=round(workload.prompt_tokens))
    capacity = Capacity(arguments.rate, workload.output_tokens, 0.7, prompt_tokens=workload.prompt_tokens)
    planned = capacity.replicas(speeds.tokens(_ROWS), prompt_speed=speeds.prompt)
    work = capacity.tokens_per_second / speeds.tokens(_ROWS) + arguments.rate * workload.prompt_tokens / speeds.prompt
    waits, least, busy = [], [], []
    for seed in range(arguments.seeds):
        trace = make_trace(workload, rate=arguments.rate, seconds=arguments.seconds, cv=cv, seed=seed)
        found = replay(trace, speeds, planned)
        waits.append(found.wait_p99)
        busy.append(found.utilisation)
        least.append(fewest(trace, speeds, wait_p99=arguments.wait, most=3 * planned).num_replicas)
    told: dict[str, Any] = {"workload": workload.name, "speculation": speculate, "cv": cv, "planned": planned}
    told |= {"wait_p99_s": [round(wait, 3) for wait in waits], "fewest": least, "busy": [round(one, 3) for one in busy]}
    return {**told, "load_at_fewest": round(work / max(least), 3), "tokens_per_s": round(speeds.tokens(_ROWS))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=1.0, help="longest wait of 99 of 100 requests")
    parser.add_argument("--cv", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="burstiness: of the gaps between arrivals")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    rows = []
    for workload in WORKLOADS.values():
        for cv in arguments.cv:
            for speculate in (False, True):
                rows.append(compared(workload, speculate=speculate, cv=cv, arguments=arguments))
                print(rows[-1], file=sys.stderr, flush=True)
    run = {name: vars(arguments)[name] for name in ("rate", "seconds", "seeds", "wait")}
    document = json.dumps({"run": run, "hardware": "h100 (projection)", "rows": rows}, indent=1)
    if arguments.out:
        arguments.out.write_text(document + "\n", encoding="utf-8")
    print(json.dumps({"run": run, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
