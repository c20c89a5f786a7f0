"""Tests whether the emitted text has the target's law, with a sequential test on the model itself.

Given the text so far, the next token of a lossless method has the target's law, whatever was drafted and wherever rounds began.
So every emitted token is an outcome to bet on. The claimed law is computed anew from the emitted text, in passes of its own.
Bets depend on the text alone. Conditional on what was drafted or accepted, tokens do *not* have the law p, so a test that used
this would reject exact methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outrider.api import LLM
from outrider.bench.audit.betting import Gambler
from outrider.bench.audit.events import EMITTED, event, law_events, repeated_pair
from outrider.bench.audit.findings import Finding, failed, passed
from outrider.bench.audit.traces import law_at, wide_logits
from outrider.core.interfaces import Target
from outrider.core.params import SamplingParams


@final
@dataclass
class EmittedTest:
    """Bets on every token of the texts that it receives."""

    llm: LLM
    params: SamplingParams
    gambler: Gambler

    @staticmethod
    def of(llm: LLM, params: SamplingParams, *, alpha: float) -> EmittedTest:
        return EmittedTest(llm, params, Gambler(EMITTED, alpha=alpha))

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        target, draft = self.llm.target, self.llm.draft
        said = wide_logits(target, prompt, tokens, width=32)
        guessed = wide_logits(draft, prompt, tokens, width=32) if draft and _fits(draft, prompt, tokens, target) else None
        for position, token in enumerate(tokens):
            law = law_at(said[position], self.params)
            events = law_events(law, token)
            if guessed is not None:
                events["draft favours"] = event(law, token, _favoured(law, law_at(guessed[position], self.params)))
            copied = repeated_pair([*prompt, *tokens[:position]])
            if copied is not None:
                events["repeats a pair"] = event(law, token, torch.arange(len(law)) == copied)
            self.gambler.bet(events)
            if self.gambler.rejected:
                return

    def judge(self) -> Finding:
        gambler = self.gambler
        name, excess, error = gambler.worst
        figures = f"{gambler.count} tokens, evidence {gambler.evidence:.3g} of {1 / gambler.alpha:.0g}"
        data = {"count": gambler.count, "evidence": gambler.evidence, "alpha": gambler.alpha, "distance": abs(excess)}
        if gambler.rejected:
            worst = f"event '{name}': {excess:+.3f} from its probability (standard error {error:.3f})"
            return failed("law", f"the text does not have the target's law: {figures}", [worst], **data)
        bound = f"biases above {gambler.sensitivity:.3f} of an event would show"
        return passed("law", f"as the target says: {figures}; false alarms at most {gambler.alpha:g}, {bound}", **data)


def _fits(draft: Target, prompt: Sequence[int], tokens: Sequence[int], target: Target) -> bool:
    return len(prompt) + len(tokens) < draft.max_len and draft.vocab_size >= target.vocab_size


def _favoured(law: Tensor, guessed: Tensor) -> Tensor:
    """Tokens to which the draft gives a larger probability than the target."""
    return guessed[: len(law)] > law
