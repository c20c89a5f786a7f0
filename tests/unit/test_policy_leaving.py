"""What becomes of the default policy where a batch comes at once and seats fall empty (``policy_leaving``: nothing is
measured).

Heads on an H200 lost 3 to 19 % to plain decoding with 64 seats (``benchmarks/results/seats_heads_8b.json``). No wrong
price is needed for that, as these made-up seconds show: seats that stay full gain, but the batch ends with its slowest request,
and until then a round takes the time of all slots.
"""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest
from policy_leaving import Leaving
from policy_prompts import Always
from policy_rounds import think_for
from policy_seats import Given

from outrider.policies.adaptive import Adaptive
from outrider.policies.tuning import AdaptiveOptions


@pytest.fixture(autouse=True)
def _thinking_takes_made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    think_for(monkeypatch, 3e-4)


def heads(slots: int, guesses: int) -> float:
    """Seconds of a round of an 8B model with a head of one layer."""
    nodes = slots * (1 + guesses)
    return 4.4e-3 + 1.55e-5 * nodes + ((2e-4 + 3e-4 * guesses) * (1 + slots / 64) if guesses else 0.0)


def batch(size: int) -> Leaving:
    rng = random.Random(3)
    return Leaving([min(max(rng.gauss(0.55, 0.13), 0.15), 0.9) for _ in range(size)], heads)


def test_a_small_batch_gains() -> None:
    requests, policy = batch(16), Adaptive(AdaptiveOptions(num_draft_tokens=4))
    policy.expect(Given(requests.prices()))
    plain = requests.answer(Always(0))
    assert fmean(requests.answer(policy, seed) for seed in (1, 2, 3)) >= 1.04 * plain


def test_a_large_batch_ends_with_its_slowest_request() -> None:
    """Every length loses there, though each gains as long as all seats are taken: long answers end as far apart, and most of
    the time all run."""
    requests = batch(64)
    tokens = 1 + fmean(requests.rates)
    assert tokens / heads(64, 1) > 1.05 / heads(64, 0), "a full round gains"
    plain = requests.answer(Always(0))
    assert max(requests.answer(Always(length)) for length in (1, 2, 4)) < 0.98 * plain
    policy = Adaptive(AdaptiveOptions(num_draft_tokens=4))
    policy.expect(Given(requests.prices()))
    assert fmean(requests.answer(policy, seed) for seed in (1, 2, 3)) >= 0.86 * plain
    alike = replace(requests, rates=[0.55] * 64, num_tokens=512)
    assert alike.answer(Always(1)) > 1.05 * alike.answer(Always(0)), "requests that are alike end together"
