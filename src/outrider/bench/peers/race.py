"""Races other engines against ours: in turns, prompt by prompt, greedy, with the same prompts and text lengths.

Speeds count the tokens and the time after the first step, for every engine, so that prefill does not count. Each engine is
compared with its own plain decoding, with ours, and with our fastest method. The verdict reports whoever wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.api import LLM
from outrider.bench.peers.peer import VARIANTS, Peer, PeerSpec, PeerText
from outrider.bench.settings import BASELINE, Setting
from outrider.bench.stats import Estimate, ratio_of, speed_of, total
from outrider.core.method import Method
from outrider.core.params import SamplingParams

OURS = "outrider"
Generate = Callable[[list[int], int], "PeerText | str"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class PeerLine:
    """One engine in one mode."""

    name: str
    version: str
    speed: Estimate
    to_own_plain: float
    to_our_plain: float
    to_our_best: float
    identical: float
    """Share of prompts with the text of our plain decoding."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "speed": self.speed.to_json()}


@dataclass(frozen=True)
class Contestant:
    """A way to write texts, and what it is compared with."""

    name: str
    engine: str
    version: str
    generate: Generate


@dataclass(frozen=True)
class Terms:
    """How long a race is, and what its seconds are."""

    max_tokens: int
    num_rounds: int
    clock: Callable[[], float] = time.perf_counter
    """A function of ``time``: ``process_time`` counts each engine's own processor, where a machine is shared."""


def race_peers(
    llm: LLM, best: Setting, specs: Sequence[PeerSpec], prompts: Sequence[list[int]], terms: Terms, say: Say = lambda _: None
) -> dict[str, Any]:
    """The ``peers`` part of a bench's document."""
    peers, skipped = _open_all(llm, specs, terms, length=int(best.options.get("num_draft_tokens", 4)))
    try:
        runners = [*_ours(llm, best, terms), *(Contestant(p.name, p.name.split()[0], p.version, p.generate) for p in peers)]
        texts, times, failed = _rounds(runners, prompts, terms, say)
    finally:
        for peer in peers:
            peer.close()
    skipped += [{"name": name, "reason": reason} for name, reason in failed.items()]
    lines = [_line(runner, runners, texts, times) for runner in runners if runner.name not in failed]
    return {
        "lines": [line.to_json() for line in lines],
        "skipped": skipped,
        "verdict": verdict(lines),
        "prompts": len(prompts),
        "max_tokens": terms.max_tokens,
        "rounds": terms.num_rounds,
    }


def _open_all(llm: LLM, specs: Sequence[PeerSpec], terms: Terms, *, length: int) -> tuple[list[Peer], list[dict[str, str]]]:
    settings = {
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "max_len": min(llm.target.max_len, 2048),
        "num_draft_tokens": length,
        "clock": terms.clock.__name__,
    }
    opened: list[Peer] = []
    skipped: list[dict[str, str]] = []
    for spec in specs:
        if not spec.python:
            reason = f"no environment; give --peer {spec.engine}=PYTHON, the Python of an environment that has it"
            skipped.append({"name": spec.engine, "reason": reason})
        for variant in VARIANTS[spec.engine] if spec.python else ():
            peer = Peer.open(spec, variant, settings)
            if isinstance(peer, Peer):
                opened.append(peer)
            else:
                skipped.append({"name": f"{spec.name or spec.engine} {variant}", "reason": peer})
    return opened, skipped


def _ours(llm: LLM, best: Setting, terms: Terms) -> list[Contestant]:
    settings = {f"{OURS} {BASELINE}": Setting(BASELINE), f"{OURS} {best.label}": best}
    return [Contestant(name, OURS, "", _our_run(llm, setting, terms.clock)) for name, setting in settings.items()]


def _our_run(llm: LLM, setting: Setting, clock: Callable[[], float]) -> Generate:
    """Runs our engine with a new method for every text, as the others do."""

    def run(prompt: list[int], max_tokens: int) -> PeerText | str:
        method: Method = setting.compose(llm)
        requests = llm.requests([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        steps = llm.steps(requests, method=method)
        state = next(steps).state
        first, began = state.num_output, clock()
        for _ in steps:
            continue
        return PeerText(state.output_ids, state.num_output - first, clock() - began)

    return run


_Texts = dict[str, list[list[int]]]
_Times = dict[str, list[list[float]]]


def _rounds(
    runners: Sequence[Contestant], prompts: Sequence[list[int]], terms: Terms, say: Say
) -> tuple[_Texts, _Times, dict[str, str]]:
    """Seconds per token by round and prompt. The first round warms up and is dropped."""
    texts: _Texts = {runner.name: [] for runner in runners}
    times: _Times = {runner.name: [] for runner in runners}
    failed: dict[str, str] = {}
    for number in range(terms.num_rounds + 1):
        for runner in runners:
            texts[runner.name] = []
            if number:
                times[runner.name].append([])
        for index, prompt in enumerate(prompts):
            shift = (number + index) % len(runners)
            for runner in [*runners[shift:], *runners[:shift]]:
                answer = failed.get(runner.name) or runner.generate(prompt, terms.max_tokens)
                if isinstance(answer, str):
                    failed[runner.name] = answer
                    continue
                texts[runner.name].append(answer.tokens)
                if number:
                    times[runner.name][-1].append(answer.seconds / max(1, answer.num_timed))
        say(f"peers: round {number} of {terms.num_rounds}")
    return texts, times, failed


def _line(runner: Contestant, runners: Sequence[Contestant], texts: _Texts, times: _Times) -> PeerLine:
    mine = times[runner.name]
    plain = next((other.name for other in runners if other.name == f"{runner.engine} {BASELINE}"), runner.name)
    ours = [other.name for other in runners if other.engine == OURS]
    best = min(ours, key=lambda name: total(times[name]))
    truth = texts[f"{OURS} {BASELINE}"]
    same = sum(a == b for a, b in zip(texts[runner.name], truth, strict=True))
    return PeerLine(
        name=runner.name,
        version=runner.version,
        speed=speed_of(len(truth), mine),
        to_own_plain=_ratio(mine, times[plain]),
        to_our_plain=_ratio(mine, times[f"{OURS} {BASELINE}"]),
        to_our_best=_ratio(mine, times[best]),
        identical=same / len(truth),
    )


def _ratio(mine: list[list[float]], other: list[list[float]]) -> float:
    return ratio_of(mine, other).value if other and other[-1] else float("nan")


def verdict(lines: Sequence[PeerLine]) -> list[str]:
    """The winner, in words."""
    found: list[str] = []
    ours = [line for line in lines if line.name.startswith(OURS)]
    best = max(ours, key=lambda line: line.speed.value)
    for engine in dict.fromkeys(line.name.split()[0] for line in lines if not line.name.startswith(OURS)):
        theirs = [line for line in lines if line.name.split()[0] == engine]
        plain = next((line for line in theirs if line.name.endswith(BASELINE)), None)
        fastest = max(theirs, key=lambda line: line.speed.value)
        if plain is not None:
            found.append(_compared("plain decoding", ours[0].speed.value, plain.speed.value, plain.name))
        found.append(
            _compared(f"best ({best.name.removeprefix(OURS + ' ')})", best.speed.value, fastest.speed.value, fastest.name)
        )
    return found


def _compared(what: str, mine: float, theirs: float, name: str) -> str:
    if mine >= theirs:
        return f"our {what} is {mine / theirs:.2f}x the speed of {name}"
    return f"{name} is {theirs / mine:.2f}x the speed of our {what}"


def peers_table(part: dict[str, Any]) -> str:
    width = max(len(line["name"]) for line in part["lines"]) + 2
    rows = [f"{'other engines':<{width}}{'tokens/s':>10}{'own plain':>11}{'our plain':>11}{'our best':>10}{'our text':>10}"]
    for line in part["lines"]:
        ratios = "".join(f"{line[key]:>10.2f}x" for key in ("to_own_plain", "to_our_plain")) + f"{line['to_our_best']:>9.2f}x"
        rows.append(f"{line['name']:<{width}}{line['speed']['value']:>10.1f}{ratios}{line['identical']:>10.0%}")
    rows += [f"  {text}" for text in part["verdict"]]
    return "\n".join([*rows, *(f"  not measured: {skip['name']}: {skip['reason']}" for skip in part["skipped"])])
