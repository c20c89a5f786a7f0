"""Simulates PEARL, in which draft and target work at the same time.

A round takes the longer of the target's pass and the draft's work, which is the token that ends the round and a chain after
it. The chain is ready for the next round if this one accepted everything and its end was foreseen. Otherwise ``pearl`` checks
nothing and emits one token (Liu et al. 2024, PEARL, arXiv 2408.11850), and a row that drafts ``beside`` drafts in turns. So a
text is a walk between two states, and its expected time is a recursion over both.

    T(n, s) = cost(s) + sum_{j < k} P(j of k) T(n - j - 1, lost)
              + P(k of k) (r T(n - k - 1, ready) + (1 - r) T(n - k - 1, lost))
    cost(ready) = max(pass(k + 1), draft(K + 1)),        k = min(K, n - 1)
    cost(lost)  = the same with k = 0  in pearl,  or  draft(k) more  beside
    r: the rate at which the draft's guess of the next token is right
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from outrider.bench.simulate import Cluster, Scenario, accepted_law

Seconds = Callable[[int], float]


def pearl_seconds(num_tokens: int, length: int, by_depth: Sequence[float], *, score: Seconds, draft: Seconds) -> float:
    """T(n, lost) of pearl. ``score(m)`` is a pass that checks m guesses, ``draft(m)`` the time of m draft steps."""
    return _seconds(num_tokens, length, by_depth, score=score, draft=draft, in_turns=False)


def beside_seconds(num_tokens: int, length: int, by_depth: Sequence[float], *, score: Seconds, draft: Seconds) -> float:
    """T(n, lost) of a row that drafts in turns after an end that was not foreseen."""
    return _seconds(num_tokens, length, by_depth, score=score, draft=draft, in_turns=True)


def _seconds(
    num_tokens: int, length: int, by_depth: Sequence[float], *, score: Seconds, draft: Seconds, in_turns: bool
) -> float:
    drafting = draft(length + 1)
    passes = [max(score(k), drafting) for k in range(length + 1)]
    lost, ready = [0.0], [0.0]
    begun, later = (_laws(by_depth, depth, length) for depth in (0, 1))  # a ready chain begins behind a right guess
    first, again = _from(by_depth, 0)[0], _from(by_depth, length + 1)[0]

    def ends(left: int, k: int, law: Sequence[float], rate: float) -> float:
        rest = sum(chance * lost[left - j - 1] for j, chance in enumerate(law[:-1]))
        return rest + law[-1] * (rate * ready[left - k - 1] + (1 - rate) * lost[left - k - 1])

    for left in range(1, num_tokens + 1):
        k = min(length, left - 1)
        alone = passes[0] + ends(left, 0, [1.0], first)
        turns = draft(k) + passes[k] + ends(left, k, begun[k], again)
        lost_now, ready_now = turns if in_turns else alone, passes[k] + ends(left, k, later[k], again)
        lost.append(lost_now)
        ready.append(ready_now)
    return lost[num_tokens]


def _laws(by_depth: Sequence[float], depth: int, length: int) -> list[list[float]]:
    """The law of the number of accepted guesses, by the length of a chain whose rates begin at a depth."""
    return [accepted_law(_from(by_depth, depth), k) for k in range(length + 1)]


def parallel_tokens_per_pass(
    by_depth: Sequence[float], length: int, formula: Callable[..., float] = pearl_seconds, *, num_tokens: int = 512
) -> float:
    """Tokens of a text per pass of the target, which a run can count."""
    return num_tokens / formula(num_tokens, length, by_depth, score=lambda _: 1.0, draft=lambda _: 0.0)


def _from(by_depth: Sequence[float], depth: int) -> list[float]:
    """Rates from a depth on. Depths beyond the measured ones keep the last rate."""
    return list(by_depth[min(depth, len(by_depth) - 1) :]) if by_depth else [0.0]


@final
@dataclass(frozen=True)
class PearlScenario:
    """A scenario whose draft runs on a device of its own, beside the target."""

    turns: Scenario
    """The scenario in which draft and target take turns."""
    formula: Callable[..., float] = pearl_seconds
    """Seconds of a text: ``pearl_seconds`` or ``beside_seconds``."""

    def speed(self, length: int, by_depth: Sequence[float], *, num_tokens: int = 256) -> float:
        """Tokens per second of the whole batch. Every round sends the guesses one way and the outcome back."""
        turns = self.turns
        alone = replace(turns, draft=None)
        crossing = 2 * turns.cluster.link.latency if turns.cluster.link is not None else 0.0
        seconds = self.formula(
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
