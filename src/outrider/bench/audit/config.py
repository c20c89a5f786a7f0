"""Options of an audit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.core.params import SamplingParams


@dataclass(frozen=True)
class AuditConfig:
    """Sizes and error rates of an audit."""

    num_prompts: int = 8
    max_tokens: int = 48
    temperature: float = 1.0
    top_p: float = 0.98
    num_tokens: int = 3000
    """Tokens that the test of the emitted law draws."""
    alpha: float = 1e-3
    """Probability of accusing an exact method, for each of the two sequential tests."""
    num_pairs: int = 12
    """Pairs of toy models of the enumeration."""

    @property
    def greedy(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)

    def sampled(self, seed: int) -> SamplingParams:
        return replace(self.greedy, temperature=self.temperature, top_p=self.top_p, seed=seed)
