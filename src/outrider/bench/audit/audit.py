"""``outrider audit``: all checks of losslessness, for one method on one model.

Proofs come first: random numbers, the rule by enumeration, and its batched form. Then comes the model: greedy text against
plain decoding's, the text of a seed, guesses against their q, and the emitted law. The proofs are exact but do not involve the
model. The tests on the model cover everything that runs, with a stated error rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.api import LLM
from outrider.bench.audit.config import AuditConfig
from outrider.bench.audit.emitted import EmittedTest
from outrider.bench.audit.findings import Audit, Finding, failed, passed, skipped
from outrider.bench.audit.guesses import GuessWatch, judge_guesses
from outrider.bench.audit.identity import (
    Compared,
    Rounding,
    TextDivergence,
    explain,
    judge_identity,
    largest_difference,
    measure_rounding,
)
from outrider.bench.audit.loss import judge_loss
from outrider.bench.audit.numbers import check_numbers
from outrider.bench.audit.proof import check_twin, prove
from outrider.bench.audit.traces import Trace, trace, wide_logits
from outrider.bench.settings import BASELINE, Setting
from outrider.core.params import SamplingParams
from outrider.methods import METHODS

_CONTEXTS = 12
"""Positions of a text at which a rule's loss is measured."""


def audit(
    llm: LLM,
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    *,
    config: AuditConfig | None = None,
    say: Callable[[Finding], None] = lambda _: None,
) -> Audit:
    """Run all checks. ``say`` receives each finding as it is made."""
    config = config or AuditConfig()
    auditor = _Auditor(llm, setting, list(prompts[: config.num_prompts]), config)
    questions = [auditor.numbers, auditor.proof, auditor.twin, auditor.rounding, auditor.greedy, auditor.seeds]
    findings = [] if setting.lossless else [_declared(setting)]
    questions += [] if setting.lossless else [auditor.loss]
    for question in [*questions, auditor.law, auditor.guesses]:
        findings.append(question())
        say(findings[-1])
    return Audit(setting.label, setting.lossless, tuple(findings))


def _declared(setting: Setting) -> Finding:
    rule = setting.acceptance or METHODS[setting.method].acceptance
    return failed("declared", f"rule {rule!r} is lossy by design: what follows measures by how much")


class _Auditor:
    """The checks, and results of earlier ones that later ones use."""

    def __init__(self, llm: LLM, setting: Setting, prompts: list[Sequence[int]], config: AuditConfig) -> None:
        self.llm, self.setting, self.prompts, self.config = llm, setting, prompts, config
        method = setting.compose(llm)
        self.rule, self.draws = method.rule, method.drafter.draws
        self.watch = GuessWatch(alpha=config.alpha)
        self.plain = [self._trace(BASELINE, prompt, config.greedy) for prompt in prompts]
        narrow = [logits for one in self.plain for logits in one.logits]
        wide = [x for one, prompt in zip(self.plain, prompts) for x in wide_logits(llm.target, prompt, one.tokens)]
        self.noise: Rounding = measure_rounding(narrow, wide, llm.target.dtype)

    def _trace(self, method: str | None, prompt: Sequence[int], params: SamplingParams) -> Trace:
        """A trace of plain decoding, or of the audited method, which is made again so that it remembers no other text."""
        if method == BASELINE:
            return trace(self.llm, self.llm.compose(BASELINE), prompt, params)
        watcher = self.watch if params.temperature > 0 else None  # at temperature 0 any guess is exact (Lemma D)
        return trace(self.llm, self.setting.compose(self.llm), prompt, params, watcher=watcher)

    def numbers(self) -> Finding:
        return check_numbers()

    def proof(self) -> Finding:
        return prove(self.rule, self.draws, num_pairs=self.config.num_pairs)

    def twin(self) -> Finding:
        return check_twin(self.rule, self.draws)

    def rounding(self) -> Finding:
        noise = self.noise
        figures = f"wide and one-token passes differ by {noise.noise:.1g} (logits spread {noise.spread:.2g}) in {noise.dtype}"
        if noise.plausible:
            return passed("rounding", figures, noise=noise.noise, spread=noise.spread)
        return failed("rounding", f"{figures}: more than rounding", noise=noise.noise, spread=noise.spread)

    def greedy(self) -> Finding:
        return self._identity("greedy", self.config.greedy)

    def seeds(self) -> Finding:
        """Check that the text is plain decoding's, if the rule promises that; otherwise that two runs give the same text."""
        if self.setting.keeps_seed:
            return self._identity("same seed", self.config.sampled(1))
        changed = 0
        for prompt in self.prompts:
            first, second = (self._trace(None, prompt, self.config.sampled(1)) for _ in range(2))
            changed += first.tokens != second.tokens
        if changed and self.setting.policy != "fixed":
            reason = f"policy {self.setting.policy!r} plans by the clock, and this rule keeps the law, not the text"
            return skipped("same seed", f"{changed} of {len(self.prompts)} texts change from run to run: {reason}")
        if changed:
            return failed("same seed", f"{changed} of {len(self.prompts)} texts change from run to run with one seed")
        return passed("same seed", f"{len(self.prompts)} texts repeat (this rule keeps the law, not plain decoding's text)")

    def _identity(self, part: str, params: SamplingParams) -> Finding:
        divergences: list[TextDivergence] = []
        largest, num_tokens = 0.0, 0
        for index, prompt in enumerate(self.prompts):
            plain = self.plain[index] if params.temperature == 0 else self._trace(BASELINE, prompt, params)
            mine = self._trace(None, prompt, params)
            found = explain(index, plain, mine, params=params, rounding=self.noise)
            divergences += [found] if found else []
            largest = max(largest, largest_difference(plain, mine))
            num_tokens += len(mine.tokens)
        return judge_identity(part, Compared(len(self.prompts), num_tokens, tuple(divergences), largest), self.noise)

    def loss(self) -> Finding:
        params = self.config.sampled(1)
        texts = [(prompt, self._trace(BASELINE, prompt, params).tokens[:_CONTEXTS]) for prompt in self.prompts[:2]]
        return judge_loss(self.rule, self.draws, (self.llm.target, self.llm.draft), texts, params)

    def law(self) -> Finding:
        test = EmittedTest.of(self.llm, self.config.sampled(0), alpha=self.config.alpha)
        seed = 100
        while test.gambler.count < self.config.num_tokens and not test.gambler.rejected:
            prompt = self.prompts[seed % len(self.prompts)]
            test.add(prompt, self._trace(None, prompt, self.config.sampled(seed)).tokens)
            seed += 1
        return test.judge()

    def guesses(self) -> Finding:
        return judge_guesses(self.watch)
