"""A complete bench: models, prompts, settings, rounds, curves, and the resulting document."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.api import LLM
from outrider.bench.bandwidth import measure_bandwidth
from outrider.bench.curves import measure_curves
from outrider.bench.limits import Limit
from outrider.bench.provenance import describe_target, provenance
from outrider.bench.runner import RunConfig, Runner
from outrider.bench.settings import BASELINE, Grid, Provider, Setting, Skipped, runnable
from outrider.bench.suites import Encoder, Suite
from outrider.bench.summary import Line, document, lines_of
from outrider.core.errors import OptionError
from outrider.core.params import SamplingParams
from outrider.methods import METHODS

_SHORTEST_PROMPT = 8
"""Tokens that a prompt must keep when it is cut to the model's context."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """Options of a bench."""

    grid: Grid = field(default_factory=Grid)
    suites: Sequence[Suite] = ()
    num_prompts: int | None = None
    """Most prompts per suite."""
    num_turns: int = 1
    run: RunConfig = field(default_factory=RunConfig)
    curves: bool = True


@dataclass(frozen=True)
class BenchOutcome:
    """Results of a bench."""

    lines: list[Line]
    skipped: list[Skipped]
    document: dict[str, Any]
    prompts: dict[str, list[list[int]]]
    """The measured prompts, by suite."""
    settings: list[Setting]

    @property
    def fastest(self) -> Setting:
        """The fastest lossless setting that speculates and needs nothing made for the bench; plain decoding if there is
        none."""
        first = self.lines[0]
        lines = [line for line in self.lines if (line.suite, line.batch_size) == (first.suite, first.batch_size)]
        lasting = {one.label: one for one in self.settings if one.lossless and not METHODS[one.method].needs}
        others = [line for line in lines if line.label in lasting and line.label != BASELINE]
        return lasting[max(others, key=lambda line: line.speedup.value, default=first).label]


def run_bench(llm: LLM, bench: Bench, *, drafts: Sequence[str] = (), say: Say = lambda _: None) -> BenchOutcome:
    """Run a bench, and record where it ran. The time limit begins here, before anything is prepared."""
    limit = Limit(bench.run.seconds)
    prompts = encode_suites(llm, bench)
    with tempfile.TemporaryDirectory() as folder:
        provider = Provider(llm, [prompt for many in prompts.values() for prompt in many], Path(folder))
        settings, skipped = runnable(llm, bench.grid.settings(), provider)
        say(f"{len(settings)} settings, {sum(map(len, prompts.values()))} prompts in {len(prompts)} suites")
        runner = Runner(llm, settings, prompts, config=bench.run, limit=limit, say=say)
        try:
            runner.run()
        except KeyboardInterrupt:
            if not runner.has_results:
                raise
            say("interrupted: what was measured until now is reported")
            runner.results.interrupted = True
    results = runner.results
    settings, skipped = runner.settings, [*skipped, *runner.skipped]
    with_curves = bench.curves and not results.interrupted and not limit.passed()
    say("measuring memory bandwidth" + (" and the cost of passes by size" if with_curves else ""))
    bandwidth = measure_bandwidth(llm.model_name, llm.target)
    found = lines_of(results, bandwidth)
    about: dict[str, Any] = {
        "provenance": provenance(),
        "model": describe_target(llm.model_name, llm.target),
        "drafts": [describe_target(name, draft) for name, draft in zip(drafts, llm.drafts, strict=False)],
        "run": asdict(bench.run),
        "bandwidth": bandwidth.to_json(),
        "suites": {name: {"prompts": len(many), "tokens": sum(map(len, many))} for name, many in runner.suites.items()},
        "settings": [setting.to_json() for setting in settings],
        "curves": [curve.to_json() for curve in _curves(llm, bench)] if with_curves else [],
        "interrupted": results.interrupted,
    }
    return BenchOutcome(found, skipped, document(found, results, skipped, about), runner.suites, settings)


def _curves(llm: LLM, bench: Bench) -> list[Any]:
    contexts = [length for length in (32, 256, 1024) if length + 64 < llm.target.max_len]
    curves = measure_curves(llm.target, contexts=contexts)
    batches = [size for size in bench.run.batch_sizes if size > 1]
    return curves + (measure_curves(llm.target, contexts=contexts[:1], batch_sizes=batches) if batches else [])


def encode_suites(llm: LLM, bench: Bench) -> dict[str, list[list[int]]]:
    """Encoded prompts by suite. Later turns of a conversation follow plain decoding's replies."""
    room = llm.target.max_len - bench.run.max_tokens - 1
    if room < _SHORTEST_PROMPT:
        raise OptionError(
            f"max_tokens = {bench.run.max_tokens} leaves no room for a prompt in a context of {llm.target.max_len} tokens; "
            "use fewer"
        )
    encoder = Encoder(llm.codec, room, bench.num_turns)
    plain = llm.compose(BASELINE)

    def reply(prompt: list[int]) -> str:
        return llm.generate(prompt, SamplingParams(max_tokens=bench.run.max_tokens), method=plain)[0].text

    found: dict[str, list[list[int]]] = {}
    for suite in bench.suites:
        many = [prompt for item in suite.first(bench.num_prompts).items for prompt in encoder.encode(item, reply)]
        found.setdefault(suite.name, []).extend(many)
    return found


def short_document(outcome: BenchOutcome, files: Mapping[str, str]) -> dict[str, Any]:
    """The last line of a bench's output: the main figures, and where the rest is."""
    first = outcome.lines[0]
    lines = [line for line in outcome.lines if (line.suite, line.batch_size) == (first.suite, first.batch_size)]
    shown = {
        line.label: {
            "tokens_per_second": round(line.speed.value, 2),
            "speedup": round(line.speedup.value, 3),
            "interval": [round(line.speedup.low, 3), round(line.speedup.high, 3)],
            "tokens_per_pass": round(line.tokens_per_pass, 3),
        }
        for line in lines
    }
    origin = {key: outcome.document["provenance"][key] for key in ("date", "commit", "cpu", "threads")}
    return {"suite": first.suite, "rounds": outcome.document["rounds"], "lines": shown, **origin, "files": dict(files)}
