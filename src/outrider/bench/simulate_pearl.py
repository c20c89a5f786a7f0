"""Simulates PEARL, in which draft and target work at the same time.

A round takes the longer of the target's pass and the draft's chain. It checks a chain if the round before accepted everything
and the draft had guessed the target's next token too. Otherwise it checks nothing and emits one token. So a text is a walk
between two states, and its expected time is a recursion over both (Liu et al. 2024, PEARL, arXiv 2408.11850).

    T(n, s) = max(pass(k + 1), draft(K + 1)) + sum_{j < k} P(j of k) T(n - j - 1, 0)
              + P(k of k) (r T(n - k - 1, K) + (1 - r) T(n - k - 1, 0)),        k = min(s, n - 1),   s in {0, K}
    r: the rate at which the draft's guess of the next token is right
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from outrider.bench.simulate import Cluster, Scenario, accepted_law

Seconds = Callable[[int], float]


def pearl_seconds(num_tokens: int, length: int, by_depth: Sequence[float], *, score: Seconds, draft: Seconds) -> float:
    """T(n, 0). ``score(m)`` is a pass that checks m guesses, ``draft(m)`` the time of m draft steps."""
    drafting = draft(length + 1)
    passes = [max(score(k), drafting) for k in range(length + 1)]
    without, ahead = [0.0], [0.0]
    laws = [accepted_law(_from(by_depth, 1), k) for k in range(length + 1)]
    first, again = _from(by_depth, 0)[0], _from(by_depth, length + 1)[0]
    for left in range(1, num_tokens + 1):
        without.append(passes[0] + first * ahead[left - 1] + (1 - first) * without[left - 1])
        k = min(length, left - 1)
        rest = sum(chance * without[left - j - 1] for j, chance in enumerate(laws[k][:-1]))
        through = laws[k][-1] * (again * ahead[left - k - 1] + (1 - again) * without[left - k - 1])
        ahead.append(passes[k] + rest + through)
    return without[num_tokens]


def pearl_tokens_per_pass(by_depth: Sequence[float], length: int, *, num_tokens: int = 512) -> float:
    """Tokens of a text per target pass, as a run counts them."""
    return num_tokens / pearl_seconds(num_tokens, length, by_depth, score=lambda _: 1.0, draft=lambda _: 0.0)


def _from(by_depth: Sequence[float], depth: int) -> list[float]:
    """Rates from a depth on. Depths beyond the measured ones keep the last rate."""
    return list(by_depth[min(depth, len(by_depth) - 1) :]) if by_depth else [0.0]


@final
@dataclass(frozen=True)
class PearlScenario:
    """A scenario whose draft runs on a device of its own, beside the target."""

    turns: Scenario
    """The scenario in which draft and target take turns."""

    def speed(self, length: int, by_depth: Sequence[float], *, num_tokens: int = 256) -> float:
        """Tokens per second of the whole batch. Every round sends the guesses one way and the outcome back."""
        turns = self.turns
        alone = replace(turns, draft=None)
        crossing = 2 * turns.cluster.link.latency if turns.cluster.link is not None else 0.0
        seconds = pearl_seconds(
            num_tokens, length, by_depth, score=lambda k: alone.cost(k) + crossing, draft=lambda k: self._drafting(k) + crossing
        )
        return turns.batch_size * num_tokens / seconds

    def best_length(self, by_depth: Sequence[float], *, longest: int = 12) -> int:
        return max(range(1, longest + 1), key=lambda length: self.speed(length, by_depth))

    def _drafting(self, num_steps: int) -> float:
        turns = self.turns
        if turns.draft is None:
            return 0.0
        place = turns.draft_cluster or Cluster(turns.cluster.hardware)
        return num_steps * place.pass_seconds(turns.draft, 1, batch_size=turns.batch_size, context=turns.context)
