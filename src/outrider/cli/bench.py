"""Runs ``outrider bench`` and ``outrider bench compare``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from outrider.api import LLM
from outrider.bench.compare import changes_table, compare_runs
from outrider.bench.peers.peer import VARIANTS, PeerSpec
from outrider.bench.peers.race import Terms, peers_table, race_peers
from outrider.bench.report import report
from outrider.bench.runner import RunConfig
from outrider.bench.session import Bench, BenchOutcome, run_bench, short_document
from outrider.bench.settings import Grid
from outrider.bench.suites import load_suites
from outrider.bench.table import table
from outrider.bundled import bundled_path
from outrider.cli.options import value_of
from outrider.cli.progress import waiting
from outrider.core.errors import OptionError
from outrider.methods import METHODS
from outrider.models.native import ready_to_measure
from outrider.models.source import local_path


def run(arguments: argparse.Namespace) -> int:
    return _compare(arguments) if arguments.also == "compare" else _bench(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    bench = bench_of(arguments)
    llm, drafts = load_pair(arguments)
    outcome = run_bench(llm, bench, drafts=drafts, say=_progress(arguments))
    print(table(outcome.lines, outcome.skipped))
    interrupted = bool(outcome.document["interrupted"])
    if arguments.peer and not interrupted:
        outcome.document["peers"] = _peers(llm, outcome, arguments, drafts)
        print(f"\n{peers_table(outcome.document['peers'])}")
    finish(outcome, arguments)
    return 130 if interrupted else 0


def _peers(llm: LLM, outcome: BenchOutcome, arguments: argparse.Namespace, drafts: list[str]) -> dict[str, Any]:
    """Race other engines against our plain decoding and our fastest setting of this bench."""
    asked = list(VARIANTS) if "all" in arguments.peer else arguments.peer
    model = str(local_path(llm.model_name))
    specs = [PeerSpec.of(text, model=model, draft=str(local_path(drafts[0])) if drafts else None) for text in asked]
    prompts = [prompt for many in outcome.prompts.values() for prompt in many]
    say = _progress(arguments)
    return race_peers(
        llm,
        outcome.fastest,
        specs,
        prompts[: arguments.peer_prompts],
        Terms(arguments.max_tokens, arguments.rounds),
        say=say,
    )


def finish(outcome: BenchOutcome, arguments: argparse.Namespace) -> None:
    """Write the files. The last line of standard output is one JSON document."""
    files: dict[str, str] = {}
    for name, path in (("json", arguments.json), ("html", arguments.html)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(outcome.document) if name == "json" else report(outcome.document), encoding="utf-8")
            files[name] = str(path)
    print(json.dumps(short_document(outcome, files)))


def _compare(arguments: argparse.Namespace) -> int:
    old, new = ([_read(Path(name)) for name in names_of(side)] for side in (arguments.old, arguments.new))
    changes = compare_runs(old, new)
    print(changes_table(changes, arguments.threshold))
    slower = [change.label for change in changes if change.counts and change.regressed(arguments.threshold)]
    better = [change.label for change in changes if change.counts and change.improved(arguments.threshold)]
    print(json.dumps({"slower": slower, "faster": better, "compared": sum(change.counts for change in changes)}))
    return 1 if slower else 0


def bench_of(arguments: argparse.Namespace) -> Bench:
    """The bench that the options describe, checked before any model is loaded."""
    methods = [] if arguments.methods == "all" else names_of(arguments.methods)
    grid = Grid(
        methods=methods,
        lengths=numbers_of("--num-draft-tokens", arguments.num_draft_tokens),
        acceptances=names_of(arguments.acceptance),
        policies=names_of(arguments.policy),
        options=_method_options(arguments.option),
    )
    for name in methods:
        METHODS[name]
    if arguments.rounds < 1:
        raise OptionError(f"--rounds {arguments.rounds} is not valid; use at least 1, and 3 or more for an interval")
    if arguments.seconds is not None and arguments.seconds <= 0:
        raise OptionError(f"--seconds {arguments.seconds:g} is not valid; use a positive number, or leave it out for no limit")
    config = RunConfig(
        num_rounds=arguments.rounds,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        ignore_eos=not arguments.stop_at_eos,
        batch_sizes=tuple(numbers_of("--batch-sizes", arguments.batch_sizes)),
        seconds=arguments.seconds,
    )
    suites = load_suites(names_of(arguments.suites))
    return Bench(grid, suites, arguments.prompts, arguments.turns, config, curves=not arguments.no_curves)


def load_pair(arguments: argparse.Namespace) -> tuple[LLM, list[str]]:
    """The target, its drafts if there are any, and the drafts' names."""
    ready_to_measure()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = None if arguments.model in (None, "bundled") else arguments.model
    named = arguments.draft or (["bundled"] if model is None else [])
    drafts = [bundled_path("draft") if name == "bundled" else name for name in named]
    method = "reencode" if drafts else "plain"  # takes any draft; rows that need the same vocabulary say so themselves
    with waiting(f"loading {model or 'the bundled models'}"):
        types = {"dtype": arguments.dtype, "kv_cache": arguments.kv_cache}
        return LLM(model, method=method, draft=drafts or None, device=arguments.device, **types), drafts


def _method_options(pairs: list[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        method, dot, option = name.partition(".")
        if not equals or not dot:
            raise OptionError(f"--option {pair!r} is not valid; write METHOD.NAME=VALUE, as in suffix.max_depth=32")
        METHODS[method]
        options.setdefault(method, {})[option.replace("-", "_")] = value_of(value)
    return options


def names_of(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers_of(option: str, text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    try:
        numbers = [int(part) for part in names_of(text)]
    except ValueError:
        raise OptionError(f"{option} {text!r} is not valid; write whole numbers with commas, as in 1,4,8") from None
    if any(number < 1 for number in numbers):
        raise OptionError(f"{option} {text!r} is not valid; use numbers of at least 1")
    return numbers


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}); give a file written by `outrider bench --json`") from None
    except ValueError:
        raise OptionError(f"{path} is not JSON; give a file written by `outrider bench --json`") from None


def _progress(arguments: argparse.Namespace) -> Any:
    return (lambda _: None) if arguments.quiet else (lambda text: print(text, file=sys.stderr))
