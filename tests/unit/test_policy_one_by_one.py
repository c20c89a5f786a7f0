"""One request after another on a device whose draft is never right: what the default policy loses (nothing is measured).

As in 8B shapes on an H200: a plain round takes 4.2 ms and a guess 0.16 ms. A round is seen when the next one was planned, and a
decision lasts some fourteen rounds. A request begins with a round that reads its prompt. Its rounds may be slow at first.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from policy_rounds import observation, think_for
from policy_seats import Given

from outrider.core.prices import Prices
from outrider.core.prompt_reading import NO_PROMPTS, Prompts
from outrider.policies.adaptive import Adaptive
from outrider.policies.tuning import AdaptiveOptions

PLAIN, CATCH_UP, READING = 4.19e-3, 0.5e-3, 6e-3
"""Seconds of a plain round, of a draft model that reads what it missed, and of a round that reads a prompt."""
NUM_TOKENS = 192


@dataclass
class Stream:
    """A machine whose requests come one after another."""

    guess: float = 1.6e-4
    tail: float = 0.0
    """Mean share by which a round takes longer by chance."""
    slow: float = 1.0
    """Factor of the first eight rounds of each request."""

    def share(self, policy: Adaptive, num_rounds: int, seed: int) -> tuple[float, float, Counter[str]]:
        """Speed relative to plain decoding over 200 rounds and over those after them. Then the reasons of later guesses."""
        rng, spans, reasons = random.Random(seed), [[0.0, 0.0], [0.0, 0.0]], Counter[str]()
        policy.expect(Given(self.prices(rng)))
        state, unseen, left, number, is_behind = policy.start(1), None, 0, 0, False
        for index in range(num_rounds):
            if not left:
                state, left, number, is_behind = policy.start(1), NUM_TOKENS, 0, False
                policy.carry(state, prompts := Prompts(25, 128))
                plan = replace(policy.plan(state, 1), max_depth=(0,), max_nodes=(0,))
                seen = observation((0,), (0,), draft_seconds=0.0, score_seconds=READING, plan=plan)
                unseen = replace(seen, paths=[[]], prompts=prompts)
            policy.carry(state, NO_PROMPTS)
            plan = policy.plan(state, 1)
            length = max(plan.max_depth)
            luck = rng.lognormvariate(0, 0.002) * (1 + self.tail * rng.expovariate(1)) * (self.slow if number < 8 else 1.0)
            waiting, took = CATCH_UP * (is_behind and length > 0), (PLAIN + self.guess * length) * luck
            if unseen is not None:
                policy.update(state, unseen)
            unseen = observation((length,), (0,), draft_seconds=waiting, score_seconds=took, plan=plan)
            left, number, is_behind = left - 1, number + 1, not length
            span = spans[index >= 200]
            span[0], span[1] = span[0] + PLAIN * luck, span[1] + waiting + took
            if length and index >= 200 and plan.reason:
                reasons[plan.reason.code.value] += 1
        (early, early_took), (late, late_took) = spans
        return early / early_took, late / late_took, reasons

    def prices(self, rng: random.Random) -> Prices:
        """Of whole rounds, 2 % off."""
        curve = tuple((float(k), (PLAIN + self.guess * k) * rng.uniform(0.98, 1.02)) for k in (0, 1, 2, 4))
        return Prices(((1, curve),), ((1, ((1.0, 0.0), (8.0, 0.0))),))


WORLDS = {
    "as measured": Stream(),
    "dear guesses": Stream(guess=4e-4),
    "rounds with a tail": Stream(tail=0.05),
    "slow beginnings": Stream(slow=1.4),
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_draft_that_is_never_right_is_not_tried_again_at_every_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only probes go on. Before, evidence faded while nothing was drafted, a new request began with an old hope, and a plain
    round that was slow by chance made all drafts look cheap."""
    think_for(monkeypatch, 3e-4)
    for seed in (1, 2):
        early, late, reasons = WORLDS[name].share(Adaptive(AdaptiveOptions(num_draft_tokens=4)), 1200, seed)
        assert early >= 0.975 and late >= 0.994, (early, late)
        assert reasons["fastest"] <= 30 and 10 <= reasons["probe"] <= 45, reasons
