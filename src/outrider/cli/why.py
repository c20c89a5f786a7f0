"""Runs ``outrider why``: the reasons of the rounds, counted or one by one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cli.options import load_llm, sampling_of
from outrider.cli.progress import waiting
from outrider.core.errors import RequestError
from outrider.models.native import ready_to_measure
from outrider.viz.trace_file import read_trace

_NO_REASON = {"code": "none", "sentence": "The policy gave no reason.", "numbers": {}}


def run(arguments: argparse.Namespace) -> int:
    if (arguments.prompt is None) == (arguments.trace is None):
        raise RequestError("`outrider why` explains a prompt or a trace; give one of them: a prompt, or --trace FILE")
    rounds = _told(arguments) if arguments.trace is None else read_trace(arguments.trace, request=arguments.request)
    if arguments.json:
        print(json.dumps([{"emitted": len(seen["emitted"]), "reason": _reason(seen)} for seen in rounds]))
        return 0
    if arguments.rounds:
        for number, seen in enumerate(rounds, 1):
            print(f"{number:>4}  {len(seen['emitted'])} tokens  {_reason(seen)['sentence']}")
        return 0
    for cause in causes(rounds):
        print(f"{cause.num_rounds:>4} of {len(rounds)} rounds, {cause.tokens_per_round:.2f} tokens each: {cause.sentence}")
    print(f"last round: {_reason(rounds[-1])['sentence']}")
    return 0


@dataclass
class Cause:
    """Rounds with the same reason."""

    sentence: str
    """The sentence of the latest one."""
    num_rounds: int = 0
    num_tokens: int = 0

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / self.num_rounds


def causes(rounds: Sequence[dict[str, Any]]) -> list[Cause]:
    """The reasons of a text's rounds, the most frequent first."""
    found: dict[str, Cause] = {}
    for seen in rounds:
        reason = _reason(seen)
        cause = found.setdefault(reason["code"], Cause(reason["sentence"]))
        cause.sentence = reason["sentence"]
        cause.num_rounds += 1
        cause.num_tokens += len(seen["emitted"])
    return sorted(found.values(), key=lambda cause: -cause.num_rounds)


def _reason(seen: dict[str, Any]) -> dict[str, Any]:
    return seen.get("reason") or _NO_REASON


def _told(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    params = sampling_of(arguments)
    ready_to_measure()
    llm = load_llm(arguments)
    with waiting("writing the text"):
        (output,) = llm.generate([arguments.prompt], params, trace=True)
    return [seen.to_json() for seen in output.trace]
