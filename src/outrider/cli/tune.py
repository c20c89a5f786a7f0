"""Runs ``outrider tune``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from outrider.bench.provenance import provenance
from outrider.bench.runner import RunConfig
from outrider.bench.session import Bench, encode_suites
from outrider.bench.suites import load_suites
from outrider.bench.tune import Tuned, tune
from outrider.bench.tune_config import TuneConfig
from outrider.cli.bench import load_pair, names_of
from outrider.cli.options import CONFIG_KIND
from outrider.core.errors import OptionError
from outrider.methods import METHODS


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 2:
        raise OptionError(f"--rounds {arguments.rounds} is not valid; use at least 2, so that there is an interval")
    methods = [] if arguments.methods == "all" else names_of(arguments.methods)
    for name in methods:
        METHODS[name]
    config = TuneConfig(
        methods=methods,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        batch_size=arguments.batch_size,
        num_rounds=arguments.rounds,
        seconds=arguments.seconds,
    )
    suites = load_suites(names_of(arguments.prompts))
    llm, drafts = load_pair(arguments)
    bench = Bench(suites=suites, num_prompts=arguments.num_prompts, run=RunConfig(max_tokens=arguments.max_tokens))
    prompts = [prompt for many in encode_suites(llm, bench).values() for prompt in many]
    tuned = tune(llm, prompts, config, say=lambda text: print(text, file=sys.stderr))
    print(_table(tuned))
    document = config_document(tuned, arguments, drafts)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written to {arguments.out}; use it with: outrider generate --config {arguments.out}")
    print(json.dumps(document))
    return 0


def config_document(tuned: Tuned, arguments: argparse.Namespace, drafts: list[str]) -> dict[str, Any]:
    """The document that ``--config`` reads, with how it was found."""
    best = tuned.best
    return {
        "kind": CONFIG_KIND,
        "model": None if arguments.model == "bundled" else arguments.model,
        "draft": arguments.draft,
        "method": best.setting.method,
        "acceptance": best.setting.acceptance,
        "policy": best.setting.policy,
        "options": dict(best.setting.options),
        "dtype": arguments.dtype,
        "device": arguments.device,
        "tuned": {
            "pays": tuned.pays,
            "expected_speedup": best.expected,
            "speedup": best.speedup.to_json(),
            "tokens_per_second": best.tokens_per_second,
            "drafts": len(drafts),
            "pass_seconds": dict(zip(map(str, tuned.curve.nodes), tuned.curve.seconds, strict=True)),
            "raced": [{"setting": one.setting.label, "speedup": one.speedup.to_json()} for one in tuned.raced],
            "skipped": {skip.label: skip.reason for skip in tuned.skipped},
            "provenance": provenance(),
        },
    }


def _table(tuned: Tuned) -> str:
    rows = [f"{'':<40}{'expected':>10}{'measured':>10}{'95 %':>16}{'tokens/s':>10}"]
    for one in tuned.raced:
        expected = f"{one.expected:.2f}x" if one.expected else "-"
        limits = f"{one.speedup.low:.2f} - {one.speedup.high:.2f}"
        measured = f"{one.speedup.value:.2f}x"
        rows.append(f"{one.setting.label:<40}{expected:>10}{measured:>10}{limits:>16}{one.tokens_per_second:>10.1f}")
    best = tuned.best
    if tuned.pays:
        expected = f"{best.expected:.2f}x expected, " if best.expected else ""
        rows.append(f"\n{best.setting.label}: {expected}{best.speedup.value:.2f}x measured over plain decoding")
    else:
        rows.append("\nspeculation does not pay here: plain decoding is the fastest, or nothing is faster beyond doubt")
    return "\n".join(rows)
