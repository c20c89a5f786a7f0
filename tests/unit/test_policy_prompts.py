"""What the default policy makes of prompts that are read inside rounds (``policy_prompts``: nothing is measured)."""

from __future__ import annotations

import pytest
from policy_prompts import Always, Readers
from policy_rounds import think_for
from policy_seats import Given

from outrider.core.device_round import PIECE_LEN
from outrider.core.params import SamplingParams
from outrider.core.prompt_reading import Prompts
from outrider.core.reason import ReasonCode
from outrider.core.request import Request, RequestState
from outrider.engine.device_seats import NUM_PIECES, Seat, num_pieces_left, prompts_of
from outrider.policies.adaptive import Adaptive
from outrider.policies.tuning import AdaptiveOptions


@pytest.fixture(autouse=True)
def _thinking_takes_made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision for 64 rows takes a fraction of a thousandth of a second."""
    think_for(monkeypatch, 3e-4)


def gpu(nodes: float) -> float:
    """Seconds of a pass of a large model: weights first, arithmetic from 64 nodes on."""
    return 4.0e-3 + 4e-6 * nodes if nodes <= 64 else 4.256e-3 + 8.5e-6 * (nodes - 64)


def gpu_draft(rows: int, guesses: int) -> float:
    return 1e-4 + 4.5e-4 * guesses * (1 + rows / 256)


def informed(readers: Readers) -> Adaptive:
    policy = Adaptive()
    policy.expect(Given(readers.prices()))
    return policy


@pytest.mark.parametrize(("num_seats", "prompt_len", "num_rounds"), [(64, 1000, 350), (64, 250, 350), (16, 1000, 500)])
def test_prompts_that_wait_are_in_the_account(num_seats: int, prompt_len: int, num_rounds: int) -> None:
    """Answers cannot come faster than prompts are read. With 64 seats and long prompts none of the lengths is worth its time,
    with shorter prompts or fewer seats some are."""
    readers = Readers(num_seats, prompt_len, gpu, gpu_draft)
    fixed = {length: readers.speed(Always(length), num_rounds) for length in (0, 1, 2, 4)}
    speed = readers.speed(informed(readers), num_rounds)
    assert speed >= 0.98 * max(fixed.values()), (speed, fixed)


@pytest.mark.parametrize("rate", [0.6, 0.7])
def test_prompts_do_not_make_drafts_longer(rate: float) -> None:
    """Short prompts come with almost every round, and each adds to its time. They come with the tokens of answers, so guesses
    save none of it: what pays in rounds without prompts pays in these."""
    readers, options = Readers(64, 25, gpu, gpu_draft, rate=rate), AdaptiveOptions(num_draft_tokens=6)
    policy = Adaptive(options)
    policy.expect(Given(readers.prices()))
    for num_rounds, skipped in ((110, 0), (330, 100)):
        best = max(readers.speed(Always(length), num_rounds, skipped=skipped) for length in (1, 2, 3, 4))
        speed = readers.speed(policy, num_rounds, skipped=skipped)
        assert speed >= 0.985 * best, (num_rounds, speed / best)


def test_the_reason_names_the_prompts() -> None:
    readers = Readers(64, 1000, gpu, gpu_draft)
    policy = informed(readers)
    readers.speed(policy, 120)
    state = policy.start(64)
    policy.carry(state, Prompts(512, 512, True))
    reason = policy.plan(state, 64).reason
    assert reason is not None and reason.code in (ReasonCode.PROMPTS, ReasonCode.PROBE)
    policy.carry(state, Prompts())
    reason = policy.plan(state, 64).reason
    assert reason is not None and reason.code is ReasonCode.FASTEST, "nobody waits any more"


def _seat(num_left: int) -> Seat:
    state = RequestState.of(Request([1] * (num_left + 1), SamplingParams(max_tokens=4)))
    return Seat(0, state)


@pytest.mark.parametrize(
    ("lefts", "expected"),
    [
        ([], Prompts()),
        ([10, 40], Prompts(50, NUM_PIECES[1] * PIECE_LEN, False)),
        ([25] * 8, Prompts(4 * PIECE_LEN, 4 * PIECE_LEN, False)),  # half of sixteen places would be empty
        ([25] * 9, Prompts(9 * 25, 16 * PIECE_LEN, False)),
        ([PIECE_LEN * NUM_PIECES[-1]], Prompts(PIECE_LEN * NUM_PIECES[-1], PIECE_LEN * NUM_PIECES[-1], False)),
        ([1000, 1000], Prompts(PIECE_LEN * NUM_PIECES[-1], PIECE_LEN * NUM_PIECES[-1], True)),
    ],
)
def test_a_round_says_what_it_will_read(lefts: list[int], expected: Prompts) -> None:
    seats = list(map(_seat, lefts))
    assert prompts_of(seats, num_pieces_left(seats)) == expected
