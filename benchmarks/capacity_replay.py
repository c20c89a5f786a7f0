"""The capacity model against a replay of arrivals: how many replicas it plans, and how many hold.

    python benchmarks/capacity_replay.py [--rate 100] [--seconds 240] [--traces FILE ...] [--out FILE]

Replicas are projections: an 8B target with a 1B draft on one H100, rows at most 32, acceptance 0.8 at every depth, from the
roofline of `outrider simulate`. Traces are made from published statistics (`src/outrider/bench/replay.py`), or read from files
(--traces, such as AzureLLMInferenceTrace_conv.csv), whose time is compressed to --rate. A fleet holds where 99 of 100 requests
wait less than a second before their prompt is read. For each service, burstiness and way of decoding: the replicas that the
capacity model plans at a utilisation of 0.7, their wait, and the fewest that hold, over --seeds traces. Everything is computed,
nothing is timed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from outrider.bench.capacity import Capacity
from outrider.bench.provenance import keep_results
from outrider.bench.replay import WORKLOADS, Arrival, Speeds, Workload, fewest, make_trace, read_trace, replay
from outrider.bench.simulate import Cluster, ModelShape, Scenario, hardware_named

_ROWS = 32
_RATES = (0.8,)
_CHUNK = 512
"""Tokens of a prompt that are read in one pass."""


def speeds_of(*, speculate: bool, context: int) -> Speeds:
    target, draft = ModelShape(8e9, 32, 131072), ModelShape(1e9, 16)
    cluster = Cluster(hardware_named("h100"))

    @cache
    def tokens(rows: int) -> float:
        scenario = Scenario(target, draft, cluster, batch_size=rows, context=context)
        return scenario.speed(scenario.best_length(_RATES) if speculate else 0, _RATES)

    return Speeds(tokens, _CHUNK / cluster.pass_seconds(target, _CHUNK, batch_size=1, context=context), _ROWS)


def compared(service: Service, *, speculate: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    speeds = speeds_of(speculate=speculate, context=round(service.prompt_tokens))
    capacity = Capacity(arguments.rate, service.output_tokens, 0.7, prompt_tokens=service.prompt_tokens)
    planned = capacity.replicas(speeds.tokens(_ROWS), prompt_speed=speeds.prompt)
    work = capacity.tokens_per_second / speeds.tokens(_ROWS) + arguments.rate * service.prompt_tokens / speeds.prompt
    found = [replay(trace, speeds, planned) for trace in service.traces]
    least = [fewest(trace, speeds, wait_p99=arguments.wait, most=3 * planned).num_replicas for trace in service.traces]
    told: dict[str, Any] = {"workload": service.name, "speculation": speculate, "cv": service.cv, "planned": planned}
    told |= {"wait_p99_s": [round(one.wait_p99, 3) for one in found], "fewest": least}
    told |= {"busy": [round(one.utilisation, 3) for one in found], "load_at_fewest": round(work / max(least), 3)}
    return {**told, "tokens_per_s": round(speeds.tokens(_ROWS))}


@dataclass(frozen=True)
class Service:
    """Requests to plan for, and traces of them."""

    name: str
    cv: float
    prompt_tokens: float
    output_tokens: float
    traces: list[list[Arrival]]

    @staticmethod
    def made(workload: Workload, cv: float, arguments: argparse.Namespace) -> Service:
        how = {"rate": arguments.rate, "seconds": arguments.seconds, "cv": cv}
        traces = [make_trace(workload, **how, seed=seed) for seed in range(arguments.seeds)]
        return Service(workload.name, cv, workload.prompt_tokens, workload.output_tokens, traces)

    @staticmethod
    def read(path: Path, rate: float) -> Service:
        trace = read_trace(path, rate=rate)
        gaps = [second.at - first.at for first, second in pairwise(trace)]
        lengths = mean(one.prompt_tokens for one in trace), mean(one.output_tokens for one in trace)
        return Service(path.stem, round(pstdev(gaps) / mean(gaps), 2), *lengths, [trace])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=1.0, help="longest wait of 99 of 100 requests")
    parser.add_argument("--cv", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="burstiness: of the gaps between arrivals")
    parser.add_argument("--traces", type=Path, nargs="+", help="files with TIMESTAMP, ContextTokens and GeneratedTokens")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    if arguments.traces:
        services = [Service.read(path, arguments.rate) for path in arguments.traces]
    else:
        services = [Service.made(workload, cv, arguments) for workload in WORKLOADS.values() for cv in arguments.cv]
    rows = []
    for service in services:
        for speculate in (False, True):
            rows.append(compared(service, speculate=speculate, arguments=arguments))
            print(rows[-1], file=sys.stderr, flush=True)
    run = {name: vars(arguments)[name] for name in ("rate", "seconds", "seeds", "wait")}
    what, script = "arrivals replayed against the capacity model", "benchmarks/capacity_replay.py"
    told = keep_results(arguments.out, what, rows, script=script, run=run, hardware="h100 (projection)")
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
