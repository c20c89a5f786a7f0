"""Runs settings in turns on the same prompts: the order changes from prompt to prompt, so that no setting owns a quiet moment.

A round is every suite once. Inside it every chunk of prompts is given to every setting, one after the other, before the next
chunk comes; speed-ups are ratios of times measured next to each other. Drafters that learn across requests start every round
empty, and meet a suite's prompts in order: they may learn from earlier prompts and never from an earlier round. Policies know
no text, only costs and rates, and are kept from the warm-up to the end, as an ``LLM`` keeps its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from outrider.api import LLM
from outrider.bench.decode import Decoded, decode
from outrider.bench.memory import added_bytes
from outrider.bench.settings import BASELINE, Setting
from outrider.bench.tally import Tally
from outrider.core.interfaces import Policy
from outrider.core.method import Method
from outrider.core.params import SamplingParams

_RULER_SIZE = 192


@dataclass(frozen=True)
class RunConfig:
    """How much is measured."""

    num_rounds: int = 5
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    batch_sizes: tuple[int, ...] = (1,)
    seconds: float | None = None
    """Stop starting rounds (after the second) when the next would end later than this."""

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed + index, ignore_eos=self.ignore_eos
        )


@dataclass
class Cell:
    """One setting on one suite at one batch size: a figure per round, and counts over all of them."""

    setting: Setting
    suite: str
    batch_size: int
    tokens: list[int] = field(default_factory=list)
    """Of every round."""
    times: list[list[float]] = field(default_factory=list)
    """Seconds of decoding by round and chunk, prefill excluded."""
    prefill_seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    memory: int = 0
    num_prompts: int = 0
    num_identical: int = 0
    """Prompts whose text was that of plain decoding."""


@dataclass
class Results:
    """Everything measured."""

    cells: dict[tuple[str, str, int], Cell]
    ruler: dict[tuple[str, int], list[list[float]]]
    """Seconds of a fixed piece of work, by suite and batch size, round and chunk: tells a slower machine from slower code."""
    num_rounds: int = 0
    seconds: float = 0.0

    def cell(self, label: str, suite: str, batch_size: int) -> Cell:
        return self.cells[label, suite, batch_size]


class Runner:
    """Measures settings on suites of encoded prompts."""

    def __init__(
        self,
        llm: LLM,
        settings: Sequence[Setting],
        suites: dict[str, list[list[int]]],
        *,
        config: RunConfig,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        assert settings and settings[0].method == BASELINE, "plain decoding comes first"
        self.llm, self.settings, self.suites, self.config, self._say = llm, list(settings), suites, config, say
        keys = [(s, name, size) for s in settings for name in suites for size in config.batch_sizes]
        self.results = Results({(s.label, name, size): Cell(s, name, size) for s, name, size in keys}, {})
        self._policies: dict[str, Policy] = {}

    def _fresh(self, setting: Setting) -> Method:
        """The method with an empty drafter and the policy of the rounds before."""
        made = setting.compose(self.llm)
        return Method(made.drafter, made.rule, self._policies.setdefault(setting.label, made.policy))

    def run(self) -> Results:
        began = time.perf_counter()
        self._warm_up()
        rounds_began, longest = time.perf_counter(), 0.0
        for number in range(self.config.num_rounds):
            now = time.perf_counter()
            if number >= 2 and self.config.seconds is not None and now - began + longest > self.config.seconds:
                self._say(f"stopped after {number} rounds: the next would pass {self.config.seconds:g} s")
                break
            self._round(number)
            longest = max(longest, time.perf_counter() - now)
            self.results.num_rounds = number + 1
            self._say(f"round {number + 1} of {self.config.num_rounds}: {time.perf_counter() - now:.1f} s")
        self.results.seconds = time.perf_counter() - rounds_began
        return self.results

    def _warm_up(self) -> None:
        """Every setting once at every batch size, and, given a limit, fewer prompts if three rounds would not fit into it."""
        prompts = next(iter(self.suites.values()))
        small = SamplingParams(max_tokens=8, ignore_eos=True, seed=0, temperature=self.config.temperature)
        began, num_tokens = time.perf_counter(), 0
        for setting in self.settings:
            for size in self.config.batch_sizes:
                chunk = _padded(prompts[:size], size)
                done = decode(self.llm, self._fresh(setting), chunk, [small] * len(chunk))
                num_tokens += sum(map(len, done.outputs))
        if self.config.seconds is None:
            return
        per_token = (time.perf_counter() - began) / num_tokens
        planned = sum(len(prompts) for prompts in self.suites.values()) * len(self.settings) * len(self.config.batch_sizes)
        needed = 3 * planned * self.config.max_tokens * per_token
        if needed > self.config.seconds:
            share = self.config.seconds / needed
            self.suites = {name: prompts[: max(1, int(len(prompts) * share))] for name, prompts in self.suites.items()}
            count = sum(len(prompts) for prompts in self.suites.values())
            self._say(f"{count} prompts instead of {planned // len(self.settings)}, to fit into {self.config.seconds:g} s")

    def _round(self, number: int) -> None:
        for size in self.config.batch_sizes:
            for suite, prompts in self.suites.items():
                self._suite(number, suite, prompts, size=size)

    def _suite(self, number: int, suite: str, prompts: list[list[int]], *, size: int) -> None:
        running = {s.label: self._fresh(s) for s in self.settings}
        cells = {s.label: self.results.cell(s.label, suite, size) for s in self.settings}
        ruler: list[float] = []
        for cell in cells.values():
            cell.tokens.append(0)
            cell.times.append([])
        for start in range(0, len(prompts), size):
            chunk = _padded(prompts[start : start + size], size)
            params = [self.config.params(start + i) for i in range(len(chunk))]
            shift = (number + start // size) % len(self.settings)
            outputs: dict[str, list[list[int]]] = {}
            for setting in [*self.settings[shift:], *self.settings[:shift]]:
                method = running[setting.label]
                done = decode(self.llm, method, chunk, params)
                _note(cells[setting.label], done)
                outputs[setting.label] = done.outputs
                if number == 0:
                    parts, without = [method.drafter, done.batch.drafter_state], [self.llm.target, done.batch.cache]
                    cells[setting.label].memory = max(cells[setting.label].memory, added_bytes(parts, without))
            _compare(cells, outputs)
            ruler.append(ruler_seconds())
        self.results.ruler.setdefault((suite, size), []).append(ruler)


def _padded(chunk: list[list[int]], size: int) -> list[list[int]]:
    """As many prompts as the batch has rows: the last chunk repeats some, so that every pass has the stated width."""
    return [chunk[i % len(chunk)] for i in range(size)]


def _note(cell: Cell, done: Decoded) -> None:
    cell.tokens[-1] += sum(map(len, done.outputs))
    cell.times[-1].append(done.seconds)
    cell.prefill_seconds += done.prefill_seconds
    cell.tally = cell.tally + done.tally


def _compare(cells: dict[str, Cell], outputs: dict[str, list[list[int]]]) -> None:
    for label, texts in outputs.items():
        cells[label].num_prompts += len(texts)
        cells[label].num_identical += sum(mine == other for mine, other in zip(texts, outputs[BASELINE], strict=True))


def ruler_seconds() -> float:
    """A fixed piece of work of a few milliseconds: small products, as decoding has, and a loop of Python."""
    matrix = torch.ones(_RULER_SIZE, _RULER_SIZE)
    began = time.perf_counter()
    vector, total = torch.ones(1, _RULER_SIZE), 0
    for step in range(300):
        vector = (vector @ matrix).clamp(max=1.0)
        total += sum(range(step))
    return time.perf_counter() - began
