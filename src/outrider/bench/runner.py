"""Runs settings in turns on the same prompts. The order changes from prompt to prompt, so that no setting profits from a quiet
moment.

A round is every suite once. In a round, every setting decodes a chunk of prompts before the next chunk comes, so speed-ups are
ratios of times measured next to each other. Drafters that learn across requests start every round empty and see a suite's
prompts in order. So they learn from earlier prompts, but never from an earlier round. Policies know costs and rates but no
text, so they are kept from the warm-up to the end, as in an ``LLM``. A method whose rounds are captured is kept with its
graphs: its drafter remembers the texts in its slots and no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.api import LLM
from outrider.bench.decode import Decoded, decode
from outrider.bench.limits import Limit, WarmUpCost, fit
from outrider.bench.memory import added_bytes
from outrider.bench.results import Cell, Results
from outrider.bench.settings import BASELINE, Setting, Skipped
from outrider.core.interfaces import Policy
from outrider.core.method import Method
from outrider.core.params import SamplingParams

_RULER_SIZE = 192
_WARM_TOKENS = 8
_WARM_SHARE = 0.35
"""Share of a time limit for warming up. Settings that need longer are left out."""


@dataclass(frozen=True)
class RunConfig:
    """Rounds, tokens, batch sizes and sampling parameters of a measurement."""

    num_rounds: int = 5
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    batch_sizes: tuple[int, ...] = (1,)
    seconds: float | None = None
    """Measure as much as fits into this time, from the warm-up on."""

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed + index, ignore_eos=self.ignore_eos
        )


class Runner:
    """Measures settings on suites of encoded prompts."""

    def __init__(
        self,
        llm: LLM,
        settings: Sequence[Setting],
        suites: dict[str, list[list[int]]],
        *,
        config: RunConfig,
        limit: Limit | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``limit`` began before the models were prepared. Without it, the time of ``config`` begins now."""
        assert settings and settings[0].method == BASELINE, "plain decoding comes first"
        self.llm, self.settings, self.suites, self.config, self._say = llm, list(settings), suites, config, say
        keys = [(s, name, size) for s in settings for name in suites for size in config.batch_sizes]
        self.results = Results({(s.label, name, size): Cell(s, name, size) for s, name, size in keys}, {})
        self.limit = limit or Limit(config.seconds)
        self.skipped: list[Skipped] = []
        """Settings for which there was no time."""
        self._policies: dict[str, Policy] = {}
        self._captured: dict[str, Method] = {}
        self.has_results = False
        """Whether every setting has decoded at least one chunk."""

    def _fresh(self, setting: Setting) -> Method:
        """The method with an empty drafter, and with the policy of earlier rounds."""
        if setting.label in self._captured:
            return self._captured[setting.label]
        made = setting.compose(self.llm)
        if setting.label in self._policies:
            return Method(made.drafter, made.rule, self._policies[setting.label])
        self._policies[setting.label] = made.policy
        if self.llm.rounds.graphs_of(made) is not None:
            self._captured[setting.label] = made
        return made

    def run(self) -> Results:
        """Run every round that fits. However it ends, also by Ctrl+C, ``results`` holds whole rounds of what was measured."""
        began = time.perf_counter()
        try:
            self._warm_up()
            began = time.perf_counter()
            self._rounds()
        finally:
            self.results.seconds = time.perf_counter() - began
            if self.has_results:
                self.suites = self.results.keep_whole(self.suites, self.config.batch_sizes)
        return self.results

    def _rounds(self) -> None:
        longest = 0.0
        for number in range(self.config.num_rounds):
            began = time.perf_counter()
            if number and self.limit.left() < longest:
                self._say(f"stopped after {number} rounds: the next would pass {self.limit.seconds:g} s")
                return
            if not self._round(number):
                self._say(f"stopped in round {number + 1}: {self.limit.seconds:g} s are over")
                return
            longest = max(longest, time.perf_counter() - began)
            self._say(f"round {number + 1} of {self.config.num_rounds}: {time.perf_counter() - began:.1f} s")

    def _warm_up(self) -> None:
        """Run every setting once at every batch size. With a limit, settings and prompts that do not fit are left out."""
        prompts = next(iter(self.suites.values()))
        small = SamplingParams(max_tokens=_WARM_TOKENS, ignore_eos=True, seed=0, temperature=self.config.temperature)
        costs: dict[str, WarmUpCost] = {}
        self._say(f"warming up {len(self.settings)} settings")
        for setting in self.settings:
            if len(costs) > 1 and self.limit.passed(_WARM_SHARE):
                break
            method, chunks = self._fresh(setting), [_padded(prompts[:size], size) for size in self.config.batch_sizes]
            list(self.llm.rounds.prepare(method, self.config.batch_sizes, comes_at_once=True))
            done = [decode(self.llm, method, chunk, [small] * len(chunk)) for chunk in chunks]
            prefill = sum(one.prefill_seconds for one in done) / sum(len(prompt) for chunk in chunks for prompt in chunk)
            costs[setting.label] = WarmUpCost(prefill, sum(one.seconds for one in done) / _WARM_TOKENS)
        if self.config.seconds is not None:
            self._fit(costs)

    def _fit(self, costs: Mapping[str, WarmUpCost]) -> None:
        warm = [one for one in self.settings if one.label in costs]
        reason = f"the warm-up of the others took too long; allow more than {self.config.seconds:g} s"
        self.skipped += [Skipped(one.label, reason) for one in self.settings if one.label not in costs]
        found = fit(warm, self.suites, costs, limit=self.limit, max_tokens=self.config.max_tokens, say=self._say)
        self.settings, self.suites = found.settings, found.suites
        self.skipped += found.skipped
        labels = {one.label for one in self.settings}
        cells = self.results.cells
        self.results.cells = {key: cell for key, cell in cells.items() if key[0] in labels and key[1] in self.suites}

    def _round(self, number: int) -> bool:
        """Run one round. Returns whether there was time for all of it."""
        suites = [(suite, prompts, size) for size in self.config.batch_sizes for suite, prompts in self.suites.items()]
        return all(self._suite(number, suite, prompts, size=size) for suite, prompts, size in suites)

    def _suite(self, number: int, suite: str, prompts: list[list[int]], *, size: int) -> bool:
        running = {s.label: self._fresh(s) for s in self.settings}
        cells = {s.label: self.results.cell(s.label, suite, size) for s in self.settings}
        ruler = self.results.new_round(cells.values(), suite, size)
        for start in range(0, len(prompts), size):
            if self.has_results and self.limit.passed():
                return False
            chunk = _padded(prompts[start : start + size], size)
            params = [self.config.params(start + i) for i in range(len(chunk))]
            shift = (number + start // size) % len(self.settings)
            done: dict[str, Decoded] = {}
            for setting in [*self.settings[shift:], *self.settings[:shift]]:
                method = running[setting.label]
                decoded = done[setting.label] = decode(self.llm, method, chunk, params)
                if number == 0:
                    cells[setting.label].memory = max(cells[setting.label].memory, self._added_bytes(method, decoded))
            for label, decoded in done.items():  # a chunk counts when every setting has taken it
                _note(cells[label], decoded)
            _compare(cells, {label: decoded.outputs for label, decoded in done.items()})
            ruler.append(ruler_seconds())
            self.has_results = True
        return True

    def _added_bytes(self, method: Method, decoded: Decoded) -> int:
        """Bytes that the method added to memory."""
        graphs = self.llm.rounds.graphs_of(method)
        twins = [] if graphs is None else [graphs.drafter]
        parts = [method.drafter, *twins, *(batch.drafter_state for batch in decoded.batches)]
        return added_bytes(parts, [self.llm.target, *(batch.cache for batch in decoded.batches)])


def _padded(chunk: list[list[int]], size: int) -> list[list[int]]:
    """As many prompts as the batch has rows. The last chunk repeats some, so that every pass has the stated width."""
    return [chunk[i % len(chunk)] for i in range(size)]


def _note(cell: Cell, done: Decoded) -> None:
    cell.tokens[-1] += sum(map(len, done.outputs))
    cell.times[-1].append(done.seconds)
    cell.prefill_seconds += done.prefill_seconds
    cell.tallies[-1] += done.tally


def _compare(cells: dict[str, Cell], outputs: dict[str, list[list[int]]]) -> None:
    for label, texts in outputs.items():
        cells[label].num_prompts += len(texts)
        cells[label].num_identical += sum(mine == other for mine, other in zip(texts, outputs[BASELINE], strict=True))


def ruler_seconds() -> float:
    """Seconds of a fixed piece of work: small products, as in decoding, and a loop in Python."""
    matrix = torch.ones(_RULER_SIZE, _RULER_SIZE)
    began = time.perf_counter()
    vector, total = torch.ones(1, _RULER_SIZE), 0
    for step in range(300):
        vector = (vector @ matrix).clamp(max=1.0)
        total += sum(range(step))
    return time.perf_counter() - began
