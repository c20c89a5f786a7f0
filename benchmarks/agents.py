"""Agents and long reasoning: what methods are worth on the suites ``agent`` and ``reasoning-long``, and what a memory adds.

Every method answers every prompt, greedy, in lockstep: the one that has said least makes the next round, so all meet the same
machine. The prompts of a suite are one session in their order, like an agent's tasks on the same files. The memory of a
``Conversation`` learns their files, turns and answers, and is emptied before every repetition. *Default* is what ``LLM``
chooses for the model by itself. Every method has its row's own policy, mostly ``adaptive``. Seconds are those of a processor,
of one thread.

    python benchmarks/agents.py --json benchmarks/results/agents.json
    python benchmarks/agents.py --model SmolLM2-135M-Instruct.Q4_1.gguf --json benchmarks/results/agents_smollm2.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from default_policy import useless_draft

from outrider import LLM, SamplingParams
from outrider.bench.provenance import keep_results
from outrider.bench.stats import ratio_of
from outrider.bench.suites import Encoder, Suite, load_suites
from outrider.bundled import bundled_path
from outrider.conversation import Conversation
from outrider.core.errors import OutriderError
from outrider.core.method import Method
from outrider.core.request import RequestState
from outrider.engine.step import Engine

MEMORY = "suffix, memory of the session"
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "suffix, no memory": ("suffix", {"memory_tokens": 0}),
    "prompt-lookup": ("prompt-lookup", {}),
    "draft-model": ("draft-model", {}),
    "hybrid, no memory": ("hybrid", {"memory_tokens": 0}),
}
"""Rows by name, with options. A model without a draft model has neither of the last two. Methods here remember nothing across
prompts, or repetitions would be copied."""


@dataclass
class Counted:
    """What a method did with the prompts of a suite."""

    seconds: list[list[float]] = field(default_factory=list)
    """By repetition and prompt."""
    num_tokens: int = 0
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_different: int = 0
    """Texts that are not plain decoding's."""

    def add(self, state: RequestState) -> None:
        stats = state.stats
        self.num_tokens += stats.num_tokens
        self.num_passes += stats.num_passes
        self.num_drafted += stats.num_drafted
        self.num_accepted += stats.num_accepted


def methods_of(llm: LLM, names: Sequence[str]) -> dict[str, Method]:
    """The named ones that this model can run; the default is marked, and stands last if it is none of the others."""
    found, default = dict[str, Method](), (llm.method_name, dict[str, Any]())
    for label in names:
        choice = METHODS[label]
        try:
            found[label + " (default)" * (choice == default)] = llm.compose(choice[0], **choice[1])
        except OutriderError as error:
            print(f"{label} is left out: {error}", flush=True)
    if default not in METHODS.values():
        found[f"{llm.method_name} (default)"] = llm.compose(llm.method_name)
    return found


def race(llm: LLM, methods: Mapping[str, Method], prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    """Seconds of a processor and the finished request of every method, in lockstep."""
    engines = {name: Engine(llm.target, method) for name, method in methods.items()}
    batches = {name: engine.start(llm.requests([prompt], [params])) for name, engine in engines.items()}
    seconds, running = dict.fromkeys(methods, 0.0), list(methods)
    while running:
        name = min(running, key=lambda name: batches[name].rows[0].num_output)
        began = time.process_time()
        engines[name].step(batches[name])
        seconds[name] += time.process_time() - began
        if batches[name].rows[0].is_finished:
            running.remove(name)
    return {name: (seconds[name], batch.rows[0]) for name, batch in batches.items()}


def repetition(
    talk: Conversation, methods: dict[str, Method], suite: Suite, args: argparse.Namespace, sums: dict[str, Counted]
) -> None:
    """All prompts once, in their order, with an empty memory before the first."""
    llm, params = talk.llm, SamplingParams(max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
    encoder = Encoder(llm.codec, llm.target.max_len - args.max_tokens - 64)
    talk.memory.clear()
    for one in sums.values():
        one.seconds.append([])
    for item in suite.first(args.prompts).items:
        (prompt,) = encoder.encode(item, lambda _: "")
        for text in (*(str(message["content"]) for message in item.before), *item.turns):
            talk.remember(text)
        found = race(llm, {**methods, MEMORY: talk.method}, prompt, params)
        said = found["plain"][1].output_ids
        for name, (seconds, state) in found.items():
            sums[name].seconds[-1].append(seconds)
            sums[name].add(state)
            sums[name].num_different += state.output_ids != said


def row_of(suite: str, name: str, one: Counted, plain: Counted) -> dict[str, Any]:
    """A line of the table."""
    span = ratio_of(one.seconds, plain.seconds)
    return {
        "suite": suite,
        "method": name,
        "tokens per CPU second": round(one.num_tokens / sum(map(sum, one.seconds)), 1),
        "speed to plain": round(span.value, 3),
        "low": round(span.low, 3),
        "high": round(span.high, 3),
        "tokens per pass": round(one.num_tokens / one.num_passes, 3),
        "guesses per pass": round(one.num_drafted / one.num_passes, 3),
        "accepted of guesses": round(one.num_accepted / max(1, one.num_drafted), 3),
        "tokens": one.num_tokens,
        "other texts": one.num_different,
        "rounds": len(one.seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the bundled pair, if not given")
    parser.add_argument("--draft", help="its draft model; the bundled pair has one, 'useless' is that one, shuffled")
    parser.add_argument("--suites", default="agent,reasoning-long")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help="only these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end of an answer")
    parser.add_argument("--json", type=Path, help="where the table goes, after every repetition")
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(args.model, draft=useless_draft(bundled_path("draft")) if args.draft == "useless" else args.draft)
    what = f"methods and a session's memory on the suites {args.suites.replace(',', ', ')}"
    suites, methods, talk = load_suites(args.suites.split(",")), methods_of(llm, args.methods), Conversation(llm)
    counted = {suite.name: {name: Counted() for name in (*methods, MEMORY)} for suite in suites}
    for number in range(args.rounds):
        for suite in suites:
            repetition(talk, methods, suite, args, counted[suite.name])
        print(f"repetition {number + 1}", flush=True)
        rows = [row_of(suite, name, one, by["plain"]) for suite, by in counted.items() for name, one in by.items()]
        for row in keep_results(args.json, what, rows, script="benchmarks/agents.py")["rows"]:
            print(row, flush=True)


if __name__ == "__main__":
    main()
