"""Runs ``outrider simulate``: predictions for other hardware, or checked on this machine."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from outrider.bench.capacity import Capacity
from outrider.bench.runner import RunConfig
from outrider.bench.session import Bench, encode_suites
from outrider.bench.simulate import Cluster, ModelShape, Scenario, Wire, hardware_named, tokens_per_pass
from outrider.bench.simulate_easyspec import EasySpecScenario
from outrider.bench.simulate_pearl import PearlScenario, beside_seconds, parallel_tokens_per_pass, pearl_seconds
from outrider.bench.suites import load_suites
from outrider.bench.validate import predictions_table, validate
from outrider.cli.bench import load_pair, names_of, numbers_of
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError

_CHUNK = 512
"""Prompt tokens read in one pass."""


def run(arguments: argparse.Namespace) -> int:
    return _validate(arguments) if arguments.validate else _predict(arguments)


def _predict(arguments: argparse.Namespace) -> int:
    rates, capacity = _rates(arguments.acceptance), _capacity(arguments)
    draft = ModelShape(arguments.draft_params, arguments.draft_layers) if arguments.draft_params else None
    target = ModelShape(arguments.params, arguments.layers, arguments.kv_bytes)
    cluster = Cluster(hardware_named(arguments.hardware), arguments.devices, _link(arguments))
    rows: list[dict[str, float]] = []
    print(f"{'batch':>6}{'plain tok/s':>13}{'best K':>8}{'tok/s':>10}{'speed-up':>10}{'tok/pass':>10}{'pass ms':>9}")
    for batch in numbers_of("--batch-sizes", arguments.batch_sizes):
        scenario = Scenario(target, draft, cluster, batch_size=batch, context=arguments.context)
        best = scenario.best_length(rates, longest=arguments.longest)
        plain, fast = scenario.speed(0, rates), scenario.speed(best, rates)
        pass_ms = 1000 * cluster.pass_seconds(target, 1, batch_size=batch, context=arguments.context)
        gain = tokens_per_pass(rates, best)
        print(f"{batch:>6}{plain:>13.0f}{best:>8}{fast:>10.0f}{fast / plain:>9.2f}x{gain:>10.2f}{pass_ms:>9.2f}")
        rows.append({"batch": batch, "plain": plain, "best_length": best, "speed": fast, "speedup": fast / plain})
        if capacity is not None:
            reading = _CHUNK / cluster.pass_seconds(target, _CHUNK, batch_size=1, context=arguments.context)
            plain_needs, fast_needs = (capacity.replicas(speed, reading) for speed in (plain, fast))
            rows[-1] |= {"replicas_plain": plain_needs, "replicas": fast_needs}
            print(f"{'':>6}{capacity.compared(plain, fast, reading)}")
        if arguments.pearl:
            rows[-1] |= _beside(scenario, rates, arguments.longest)
        if arguments.easyspec is not None:
            rows[-1] |= _at_once(scenario, rates, arguments)
    if all(row["best_length"] == 0 for row in rows):
        print("speculation does not pay at this acceptance and cost")
    print(json.dumps({"hardware": arguments.hardware, "devices": arguments.devices, "acceptance": rates, "rows": rows}))
    return 0


def _capacity(arguments: argparse.Namespace) -> Capacity | None:
    if arguments.load is None:
        return None
    tokens = {"tokens_per_request": arguments.request_tokens, "prompt_tokens": arguments.prompt_tokens}
    return Capacity(arguments.load, utilisation=arguments.utilisation, price=arguments.price, **tokens)


def _link(arguments: argparse.Namespace) -> Wire | None:
    if arguments.link_latency is None:
        return None
    if arguments.link_latency < 0 or arguments.link_bandwidth <= 0:
        raise OptionError("--link-latency or --link-bandwidth is not valid; use 0 or more microseconds, and more than 0 GB/s")
    return Wire(arguments.link_latency * 1e-6, arguments.link_bandwidth * 1e9)


def _beside(scenario: Scenario, rates: Sequence[float], longest: int) -> dict[str, float]:
    """Print lines for draft and target in parallel, below the scenario's own: pearl, and any row with ``beside``."""
    turns, told = scenario.speed(scenario.best_length(rates, longest=longest), rates), dict[str, float]()
    for name, formula in (("pearl", pearl_seconds), ("beside", beside_seconds)):
        parallel = PearlScenario(scenario, formula)
        best = parallel.best_length(rates, longest=longest)
        speed, tokens = parallel.speed(best, rates), parallel_tokens_per_pass(rates, best, formula)
        print(f"{name:>6}{'':>13}{best:>8}{speed:>10.0f}{speed / turns:>9.2f}x{tokens:>10.2f}   of the line above")
        told |= {f"{name}_length": best, f"{name}_speed": speed, f"{name}_against_turns": speed / turns}
    return told


def _at_once(scenario: Scenario, rates: Sequence[float], arguments: argparse.Namespace) -> dict[str, float]:
    """Print a line for the draft's layers in parallel, below the scenario's own."""
    if arguments.easyspec < 2 or scenario.draft is None:
        raise OptionError("--easyspec divides the layers of a draft among devices; give 2 devices or more, and --draft-params")
    easyspec = EasySpecScenario(scenario, arguments.easyspec)
    fuzzy = _rates(arguments.easyspec_acceptance) if arguments.easyspec_acceptance else rates
    best = easyspec.best_length(fuzzy, longest=arguments.longest)
    speed, turns = easyspec.speed(best, fuzzy), scenario.speed(scenario.best_length(rates, longest=arguments.longest), rates)
    tokens = tokens_per_pass(fuzzy, best)
    print(f"{'easy':>6}{'':>13}{best:>8}{speed:>10.0f}{speed / turns:>9.2f}x{tokens:>10.2f}   of the line above")
    return {"easyspec_length": best, "easyspec_speed": speed, "easyspec_against_turns": speed / turns}


def _validate(arguments: argparse.Namespace) -> int:
    if arguments.cpu_time and arguments.threads != 1:
        raise OptionError("--cpu-time adds up the seconds of all threads; use it with --threads 1")
    llm, _ = load_pair(arguments)
    run_config = RunConfig(max_tokens=arguments.max_tokens)
    bench = Bench(suites=load_suites(["stories", "summary"]), num_prompts=arguments.prompts, run=run_config)
    prompts = [prompt for many in encode_suites(llm, bench).values() for prompt in many]
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    with waiting("measuring synthetic drafters"):
        found = validate(llm, prompts, max_tokens=arguments.max_tokens, num_rounds=arguments.rounds, clock=clock)
    print(predictions_table(found))
    worst = max(abs(one.error) for one in found)
    print(f"largest error {worst:.1%}")
    print(json.dumps({"largest_error": worst, "rows": [one.to_json() for one in found]}))
    return 0


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in names_of(text)]
    except ValueError:
        rates = []
    if not rates or any(not 0 <= rate <= 1 for rate in rates):
        raise OptionError(f"--acceptance {text!r} is not valid; write probabilities with commas, as in 0.8,0.7")
    return rates
