"""Methods that continue the same prompts in turns, one request at a time, timed by the CPU time of this process.

A machine that is shared slows all of them alike, so their order holds where a clock's would not. Every text must be that of
plain decoding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.api import LLM
from outrider.bench.decode import decode
from outrider.core.method import Method
from outrider.core.params import SamplingParams


@dataclass(eq=False)
class Timed:
    """A method, and what it took so far."""

    llm: LLM
    method: Method
    drafting: list[float] = field(default_factory=list[float])
    """CPU milliseconds of every draft."""
    per_token: list[float] = field(default_factory=list[float])
    """CPU seconds for a token of every text, prompt apart."""
    num_tokens: int = 0
    num_passes: int = 0

    def __post_init__(self) -> None:
        inner = self.method.drafter.propose

        def propose(*arguments: Any) -> Any:
            began = time.process_time()
            draft = inner(*arguments)
            self.drafting.append(1e3 * (time.process_time() - began))
            return draft

        self.method.drafter.propose = propose  # type: ignore[method-assign]

    def run(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Continue a prompt greedily and return the text."""
        params = SamplingParams(max_tokens=num_tokens)
        done = decode(self.llm, self.method, [prompt], [params], clock=time.process_time)
        stats = done.states[0].stats
        self.per_token.append(done.seconds / stats.num_tokens)
        self.num_tokens, self.num_passes = self.num_tokens + stats.num_tokens, self.num_passes + stats.num_passes
        return done.outputs[0]

    def forget(self) -> None:
        """Drop what was measured."""
        self.drafting.clear()
        self.per_token.clear()
        self.num_tokens = self.num_passes = 0

    @property
    def speed(self) -> float:
        """Tokens per CPU second, the median text's."""
        return round(1 / statistics.median(self.per_token), 1)

    @property
    def tokens_per_pass(self) -> float:
        return round(self.num_tokens / self.num_passes, 2)

    @property
    def draft_ms(self) -> float:
        """CPU milliseconds of a draft, the median one's."""
        return round(statistics.median(self.drafting), 2)


def race(plain: Timed, others: Mapping[str, Timed], prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Continue every prompt by plain decoding and by all others, after a short text that warms each of them up."""
    for timed in (plain, *others.values()):
        timed.run(prompts[0], 8)
        timed.forget()
    for prompt in prompts:
        text = plain.run(prompt, num_tokens)
        for name, timed in others.items():
            assert timed.run(prompt, num_tokens) == text, f"{name} changed the text"
