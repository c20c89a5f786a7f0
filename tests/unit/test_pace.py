"""Learning has a budget of time beside serving. Time is made up here: nothing depends on speed."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from outrider.train.pace import Pace, WorkEnded


class Told:
    """A pace under a made-up clock."""

    def __init__(self, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("outrider.train.pace.time.perf_counter", lambda: self.now)
        self.pace = Pace(share)
        self.pace._price = 1.0

    def passes(self, seconds: float, *, is_idle: bool) -> None:
        self.now += seconds
        self.pace.tell(is_idle=is_idle)

    def operation(self, seconds: float, *, is_idle: bool) -> None:
        self.pace.step()
        self.passes(seconds, is_idle=is_idle)
        self.pace._rest()


def test_learning_has_a_share_of_the_time_of_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation waits until serving has paid for the one before."""
    told = Told(0.25, monkeypatch)
    pace = told.pace
    told.passes(0, is_idle=False)
    told.passes(9, is_idle=False)
    assert pace._may_work() and pace.saved == 0, "nothing is saved up"
    told.operation(2, is_idle=False)
    assert pace.seconds == pace.beside == pace._price == 2 and pace.saved == -2
    told.passes(7.9, is_idle=False)
    assert not pace._may_work()
    told.passes(0.1, is_idle=False)
    assert pace._may_work()
    pace.saved = -10.0
    pace.end()
    assert pace._may_work()


def test_learning_begins_in_pauses_that_last_the_longer_the_more_it_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(0.25, monkeypatch)
    pace = told.pace
    told.passes(0, is_idle=True)
    for owed, pause in ((0.0, 1.0), (1.0, 2.0), (3.0, 8.0)):
        pace.saved = -owed
        told.passes(0, is_idle=False)
        told.passes(0, is_idle=True)
        told.passes(pause - 0.1, is_idle=True)
        assert not pace._may_work(), "the pause may be a moment between two waves"
        told.passes(0.2, is_idle=True)
        assert pace._may_work()
    told.operation(50, is_idle=True)
    assert pace.saved == -3 and pace.seconds == 50 and pace.beside == 0, "idle time neither pays nor forgives"


@pytest.mark.parametrize(("busy", "pause"), [(0.3, 0.11), (0.3, 0.25), (1.0, 0.5), (0.05, 1.0), (4.0, 7.0)])
def test_learning_takes_no_more_than_its_share_however_requests_come(
    busy: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations of 0.1 s begin whenever they may, beside requests that come in waves."""
    told, share, price, tick = Told(0.03, monkeypatch), 0.03, 0.1, 0.01
    pace, left, clock = told.pace, 0, 0.0
    pace._price = price
    for _ in range(40_000):
        clock += tick
        told.passes(tick, is_idle=clock % (busy + pause) >= busy)
        left -= 1
        if left == 0:
            pace._rest()
        if left <= 0 and pace._may_work():
            pace.step()
            left = round(price / tick)
    assert pace.served > 10 and pace._price == pytest.approx(price)
    assert 0 < pace.beside <= share * pace.served + price * (2 + math.log2(max(2.0, pause / price)))


def test_learning_that_waits_goes_on_in_the_middle_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still before an operation while requests are served, and before those of its backward pass too."""
    told, order = Told(0.001, monkeypatch), list[str]()
    weight = torch.ones(2, requires_grad=True)
    told.pace.saved = -0.5

    def learn() -> None:
        with told.pace.working():
            loss = (weight * 2).sum()
            order.append("forward")
            told.pace.saved = -0.5
            told.passes(0, is_idle=False)
            loss.backward()
            order.append("backward")

    thread = threading.Thread(target=learn)
    told.passes(0, is_idle=False)
    thread.start()
    thread.join(0.05)
    assert not order
    told.passes(0, is_idle=True)
    told.passes(2, is_idle=True)
    while not order:
        thread.join(0.01)
    thread.join(0.05)
    assert order == ["forward"]
    told.passes(0, is_idle=True)
    told.passes(2, is_idle=True)
    thread.join(30)
    assert order == ["forward", "backward"] and weight.grad is not None and weight.grad.tolist() == [2, 2]


def test_work_is_given_up_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(0.5, monkeypatch)
    told.passes(9, is_idle=True)
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(WorkEnded), told.pace.working():
        loss = (weight * 2).sum()
        told.pace.end()
        loss.backward()
    assert weight.grad is None and torch.ones(2).sum() == 2, "other work goes on"


def test_without_a_limit_nothing_waits() -> None:
    pace = Pace(1.0)
    pace.tell(is_idle=False)
    pace.saved = -9.0
    with pace.working():
        assert torch.ones(2).sum() == 2
    assert pace.seconds > 0
