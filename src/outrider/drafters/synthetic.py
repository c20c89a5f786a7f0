"""Synthetic acceptance: guesses that are right with a set probability, to measure speed at any acceptance without a drafter.

The text is known beforehand (plain decoding wrote it once), so a guess can be made right or wrong at will. At every depth it is
the next token of that text with probability ``rate``, and another token otherwise. Everything else is real: the passes, the
walk, the caches, and, if asked for, the time that drafting would take. The speed measured this way is what a drafter of that
acceptance and cost would reach on this machine.

    guess(depth) = text[n + depth] if u < rate else another token;      E[tokens per pass] = (1 - rate^(K+1)) / (1 - rate)

Engines have modes that accept guesses by a coin and emit wrong text (vLLM's synthetic acceptance, SGLang's simulated length).
Here the rule is the coupled one and the text is the target's: lossless, even if the known text is wrong (then nothing is
accepted).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from outrider.core.draft import Draft, Draws, Shape
from outrider.core.errors import OptionError
from outrider.core.interfaces import Context, Drafter, Observation, Plan, Stateless
from outrider.core.own_time import own_seconds
from outrider.core.rng import Purpose
from outrider.core.tree import TokenTree


@dataclass(frozen=True)
class SyntheticOptions:
    """How accurate and how slow the guesses are."""

    rate: float | tuple[float, ...] = 0.7
    """Probability that a guess is right if those before it were. One number, or one per depth; the last one repeats."""
    seconds_per_guess: float = 0.0
    """Simulated drafting time of a round, per guess along the path."""

    def __post_init__(self) -> None:
        if not self.rates or any(not 0 <= rate <= 1 for rate in self.rates):
            raise OptionError(f"rate = {self.rate!r} is not valid; use probabilities between 0 and 1")
        if self.seconds_per_guess < 0:
            raise OptionError(f"seconds_per_guess = {self.seconds_per_guess!r} is not valid; use 0 or a positive number")

    @property
    def rates(self) -> tuple[float, ...]:
        return self.rate if isinstance(self.rate, tuple) else (self.rate,)

    def at(self, depth: int) -> float:
        return self.rates[min(depth, len(self.rates) - 1)]


@final
class Synthetic(Drafter):
    """Chains from texts known beforehand."""

    offers: ClassVar = (Draws.DETERMINISTIC,)
    shape: ClassVar = Shape.CHAIN
    draws = Draws.DETERMINISTIC

    def __init__(self, options: SyntheticOptions, *, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        """``texts``: prompt and output together, for every request that will be made."""
        self.options = options
        self.vocab_size = vocab_size
        self._texts = [list(text) for text in texts]

    def start(self, rows: Sequence[Sequence[int]], taps: Mapping[int, list[Tensor]]) -> Stateless:
        del rows, taps
        return Stateless()

    def propose(self, state: Stateless, context: Context, plan: Plan) -> Draft:
        del state
        began, longest = own_seconds(), max(plan.max_depth)
        lanes = torch.arange(longest, device=context.device).expand(len(context.tokens), -1)
        coins = context.noise.uniform(Purpose.DRAFT, lanes).tolist()
        rows = [
            self._chain(tokens, depth, coins[row])
            for row, (tokens, depth) in enumerate(zip(context.tokens, plan.max_depth, strict=True))
        ]
        while own_seconds() - began < longest * self.options.seconds_per_guess:
            pass  # as busy as a draft model would be
        return Draft(TokenTree.of_rows([(row, range(-1, len(row) - 1)) for row in rows], context.device), self.draws)

    def observe(self, state: Stateless, observation: Observation) -> None:
        del state, observation

    def _chain(self, tokens: Sequence[int], depth: int, coins: Sequence[float]) -> list[int]:
        """The root, then as many guesses as asked for. They are wrong where the text is unknown."""
        known = next((text for text in self._texts if text[: len(tokens)] == tokens), [])
        chain = [tokens[-1]]
        for step in range(depth):
            at = len(tokens) + step
            right = known[at] if at < len(known) else None
            if right is not None and coins[step] < self.options.at(step):
                chain.append(right)
            else:
                chain.append((right if right is not None else 0) + 1 if right != self.vocab_size - 1 else 0)
        return chain
