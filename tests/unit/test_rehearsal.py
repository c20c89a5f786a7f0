"""Prices are measured once, kept, and never trusted blindly. Passes have scripted prices here: no clock is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import rehearsal
from outrider.core.errors import RequestError
from outrider.core.interfaces import Target
from outrider.core.prices import Prices
from outrider.drafters.plain import NullDrafter
from outrider.methods import compose
from outrider.models.tiny import TableModel
from outrider.rehearsal import Rehearsal, measure


@dataclass
class Clock:
    """Time that passes only where somebody spends it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def scripted(clock: Clock, price: Callable[[int], float]) -> TableModel:
    """A model whose passes take ``price(packed nodes)`` seconds."""
    model = TableModel(torch.full((12,), 1 / 12), max_len=1024)
    score = model.score

    def timed(tree: Any, *args: Any, **named: Any) -> Any:
        clock.now += price(sum(tree.sizes))
        return score(tree, *args, **named)

    model.score = timed  # type: ignore[method-assign]
    return model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("outrider.engine.step.time", SimpleNamespace(perf_counter=clock))
    return clock


def chain(length: int) -> int:
    return length


def test_passes_are_priced_by_their_nodes_and_drafts_by_their_guesses(clock: Clock) -> None:
    target, draft = scripted(clock, lambda nodes: 1e-3 + 1e-4 * nodes), scripted(clock, lambda nodes: 2e-5 * nodes)
    prices = measure(target, compose("draft-model", target, draft=draft).drafter, chain, clock=clock)
    assert prices is not None and [place for place, _ in prices.passes] == [1, 2, 4, 8, 16, 32, 64]
    assert all(seconds == pytest.approx(1e-3 + 1e-4 * place) for place, seconds in prices.passes)
    assert prices.passing(48) == pytest.approx(5.8e-3) and prices.passing(640) == pytest.approx(65e-3)
    assert [rows for rows, _ in prices.drafts] == [1, 8]
    one, four = (prices.drafting(1, length) for length in (1, 4))
    assert one is not None and four is not None and four - one == pytest.approx(3 * 2e-5), "a pass of the draft for each guess"
    assert (prices.drafting(8, 4) or 0) - (prices.drafting(8, 1) or 0) == pytest.approx(8 * 3 * 2e-5)


def test_a_rehearsal_ends_in_time(clock: Clock) -> None:
    slow = scripted(clock, lambda nodes: 0.02 * nodes)
    prices = measure(slow, NullDrafter(), chain, clock=clock)
    assert prices is not None and 2 <= len(prices.passes) <= 4 and not prices.drafts
    assert clock.now < 1.0
    assert measure(scripted(clock, lambda nodes: 1.0), NullDrafter(), chain, clock=clock) is None, "serving will tell"


def test_drafters_that_learn_or_find_nothing_or_refuse_have_no_price(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = scripted(clock, lambda nodes: 1e-3)
    suffix = compose("suffix", target).drafter
    before = repr([vars(memory).keys() for memory in suffix.memories])
    prices = measure(target, suffix, chain, clock=clock)
    assert prices is not None and not prices.drafts and prices.passing(64) == pytest.approx(1e-3)
    assert repr([vars(memory).keys() for memory in suffix.memories]) == before

    def refuse(*args: Any) -> None:
        raise RequestError("no made-up text here")

    drafter = compose("prompt-lookup", target).drafter
    monkeypatch.setattr(type(drafter), "propose", refuse)
    found = measure(target, drafter, chain, clock=clock)
    assert found is not None and not found.drafts


def test_a_disturbed_price_is_mended_by_those_of_more_work() -> None:
    assert rehearsal._points({1: 1.0, 4: 3.0, 2: 5.0, 8: 4.0}) == ((1.0, 1.0), (2.0, 3.0), (4.0, 3.0), (8.0, 4.0))


def source(target: Target, folder: Path, clock: Clock, **label: Any) -> Rehearsal:
    return Rehearsal(target, NullDrafter(), label, folder, clock)


def test_prices_are_kept_and_read_again(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = scripted(clock, lambda nodes: 1e-3)
    first = source(target, tmp_path / "new", clock, method="a").read(chain)
    monkeypatch.setattr(rehearsal, "measure", lambda *args, **named: pytest.fail("measured twice"))
    again = source(target, tmp_path / "new", clock, method="a")
    assert again.read(chain) == first and first is not None
    assert source(target, tmp_path, clock, method="b").path.name != again.path.name
    again.doubt()
    again.doubt()
    assert not again.path.exists(), "what rounds contradict is measured again"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"passes": [], "drafts": []}', '{"passes": [[1, -1]], "drafts": []}', '{"passes": 3, "drafts": []}',
     '{"passes": [[2, 1], [1, 1]], "drafts": []}', '{"passes": [[1, 1]], "drafts": [[0, [[1, 1]]]]}',
     '{"passes": [[1, "x"]], "drafts": []}', '{"passes": [[1, NaN]], "drafts": []}', '{"passes": [[1, 1, 1]], "drafts": []}'],
)  # fmt: skip
def test_a_file_that_is_no_price_list_is_written_anew(text: str, clock: Clock, tmp_path: Path) -> None:
    here = source(scripted(clock, lambda nodes: 1e-3), tmp_path, clock)
    here.path.write_text(text)
    prices = here.read(chain)
    assert prices is not None and Prices.of_json(json.loads(here.path.read_text())) == prices


def test_a_folder_that_cannot_be_written_is_no_error(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert source(scripted(clock, lambda nodes: 1e-3), tmp_path / "file" / "below", clock).read(chain) is not None


def test_no_rehearsal_without_room(clock: Clock, tmp_path: Path) -> None:
    short = TableModel(torch.full((12,), 1 / 12), max_len=64)
    assert source(short, tmp_path, clock).read(chain) is None and not list(tmp_path.iterdir())


def test_prices_of_a_busy_machine_are_measured_again_on_a_quiet_one(clock: Clock, tmp_path: Path) -> None:
    """And those of a quiet machine stay, however busy it is now."""
    pace = 4.0
    target = scripted(clock, lambda nodes: pace * (1e-3 + 1e-4 * nodes))
    source = Rehearsal(target, NullDrafter(), {"method": "plain"}, tmp_path, clock)
    busy = source.read(chain)
    pace = 1.0
    quiet = source.read(chain)
    pace = 4.0
    later = source.read(chain)
    assert busy is not None and quiet is not None
    assert busy.passing(8) == pytest.approx(4 * quiet.passing(8))
    assert later == quiet == Prices.of_json(json.loads(source.path.read_text()))


def test_a_slow_model_does_not_try_its_prices(clock: Clock, tmp_path: Path) -> None:
    target = scripted(clock, lambda nodes: 0.03 + 0.005 * nodes)
    source = Rehearsal(target, NullDrafter(), {"method": "plain"}, tmp_path, clock)
    known, began = source.read(chain), clock()
    assert known is not None and source.read(chain) == known and clock() == began
