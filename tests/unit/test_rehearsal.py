"""Prices are measured once, kept, and never trusted blindly. Passes have scripted prices here: no clock is read."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from outrider import LLM, api
from outrider.core.device_round import Frame
from outrider.core.errors import RequestError
from outrider.core.interfaces import Drafter, Target
from outrider.core.prices import Prices
from outrider.drafters.plain import NullDrafter
from outrider.engine.round_kind import RoundKind
from outrider.methods import compose
from outrider.models.tiny import TableModel
from outrider.rehearsal import rehearsal
from outrider.rehearsal.rehearsal import KnownPrices, Rehearsal, expect_prices


@dataclass
class Clock:
    """Time that passes only where somebody spends it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def scripted(clock: Clock, price: Callable[[int], float]) -> TableModel:
    """A model whose passes take ``price(packed nodes)`` seconds."""
    model = TableModel(torch.full((12,), 1 / 12), max_len=2048)
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
    monkeypatch.setattr("outrider.engine.step.own_seconds", clock)
    return clock


def chain(length: int) -> int:
    return length


def measured(target: Target, drafter: Drafter, folder: Path, clock: Clock) -> Prices | None:
    return Rehearsal(target, drafter, {}, folder=folder, clock=clock).read(chain)


def test_passes_are_priced_by_their_nodes_and_drafts_by_their_guesses(clock: Clock, tmp_path: Path) -> None:
    target, draft = scripted(clock, lambda nodes: 1e-3 + 1e-4 * nodes), scripted(clock, lambda nodes: 2e-5 * nodes)
    prices = measured(target, compose("draft-model", target, draft=draft).drafter, tmp_path, clock)
    assert prices is not None
    (rows, points), *several = prices.passes
    assert rows == 1 and [place for place, _ in points] == [0, 1, 3, 7, 15, 31, 63, 255]
    assert [(rows, [place for place, _ in curve]) for rows, curve in several] == [(8, [0, 1, 4, 8]), (32, [0, 2])]
    assert [seconds for _, seconds in points] == pytest.approx([1.1e-3 + 1e-4 * place for place, _ in points])
    assert prices.passing(8, 5) == pytest.approx(5.8e-3) and prices.passing(64, 9) == pytest.approx(65e-3), "by nodes"
    assert [rows for rows, _ in prices.drafts] == [1, 8, 32]
    one, four = (prices.drafting(1, length) for length in (1, 4))
    assert one is not None and four is not None and four - one == pytest.approx(3 * 2e-5), "a pass of the draft for each guess"
    for rows in (8, 32, 128):
        assert (prices.drafting(rows, 4) or 0) - (prices.drafting(rows, 1) or 0) == pytest.approx(rows * 3 * 2e-5)


def test_nodes_of_a_timed_pass_have_different_tokens(clock: Clock, tmp_path: Path) -> None:
    """Nodes with the same token would choose the same experts, and a mixture of experts would look cheap."""
    passes, drafted = list[tuple[int, int, int]](), set[int]()
    target = TableModel(torch.full((4096,), 1 / 4096), max_len=2048)
    draft = TableModel(torch.full((4096,), 1 / 4096), max_len=2048)
    score, drafting = target.score, draft.score

    def watched(tree: Any, *args: Any, **named: Any) -> Any:
        passes.append((tree.tokens.numel(), len(tree.tokens.unique()), len(tree.tokens)))
        return score(tree, *args, **named)

    def drafted_with(tree: Any, *args: Any, **named: Any) -> Any:
        drafted.add(len(tree.tokens[:, 0].unique()))
        return drafting(tree, *args, **named)

    target.score, draft.score = watched, drafted_with  # type: ignore[method-assign]
    measured(target, NullDrafter(), tmp_path, clock)
    assert {count for count, _, _ in passes} >= {1, 8, 64, 256}
    assert all(count - kinds <= rows for count, kinds, rows in passes), "only roots may be equal"
    measured(target, compose("draft-model", target, draft=draft).drafter, tmp_path, clock)
    assert {1, 8, 32} <= drafted, "the texts of rows differ"


def test_a_rehearsal_ends_in_time(clock: Clock, tmp_path: Path) -> None:
    slow = scripted(clock, lambda nodes: 0.02 * nodes)
    prices = measured(slow, NullDrafter(), tmp_path / "slow", clock)
    assert prices is not None and 2 <= len(prices.passes[0][1]) <= 4 and not prices.drafts
    assert clock.now < 1.0
    assert measured(scripted(clock, lambda nodes: 1.0), NullDrafter(), tmp_path, clock) is None, "serving will tell"


def test_drafters_that_learn_or_find_nothing_or_refuse_have_no_price(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = scripted(clock, lambda nodes: 1e-3)
    suffix = compose("suffix", target).drafter
    before = repr([vars(memory).keys() for memory in suffix.memories])
    prices = measured(target, suffix, tmp_path, clock)
    assert prices is not None and not prices.drafts and prices.passing(1, 63) == pytest.approx(1e-3)
    assert repr([vars(memory).keys() for memory in suffix.memories]) == before

    def refuse(*args: Any) -> None:
        raise RequestError("no made-up text here")

    drafter = compose("prompt-lookup", target).drafter
    monkeypatch.setattr(type(drafter), "propose", refuse)
    found = measured(target, drafter, tmp_path, clock)
    assert found is not None and not found.drafts


def test_a_disturbed_price_is_mended_by_those_of_more_work() -> None:
    assert rehearsal._points({1: 1.0, 4: 3.0, 2: 5.0, 8: 4.0}) == ((1.0, 1.0), (2.0, 3.0), (4.0, 3.0), (8.0, 4.0))


def source(target: Target, folder: Path, clock: Clock, **label: Any) -> Rehearsal:
    return Rehearsal(target, NullDrafter(), label, folder=folder, clock=clock)


def test_prices_are_kept_and_read_again(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = scripted(clock, lambda nodes: 1e-3)
    first = source(target, tmp_path / "new", clock, method="a").read(chain)
    monkeypatch.setattr(rehearsal, "_prices", lambda *args: pytest.fail("measured twice"))
    again = source(target, tmp_path / "new", clock, method="a")
    assert again.read(chain) == first and first is not None
    assert source(target, tmp_path, clock, method="b").path.name != again.path.name
    again.doubt()
    again.doubt()
    assert not again.path.exists(), "what rounds contradict is measured again"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"passes": [], "drafts": []}', '{"passes": [[1, [[1, -1]]]], "drafts": []}',
     '{"passes": 3, "drafts": []}', '{"passes": [[1, [[2, 1], [1, 1]]]], "drafts": []}', '{"passes": [[1, 2]], "drafts": []}',
     '{"passes": [[1, [[1, 1]]]], "drafts": [[0, [[1, 1]]]]}', '{"passes": [[1, [[1, "x"]]]], "drafts": []}',
     '{"passes": [[1, [[1, NaN]]]], "drafts": []}', '{"passes": [[1, [[1, 1, 1]]]], "drafts": []}',
     '{"passes": [[8, [[1, 1]]], [1, [[1, 1]]]], "drafts": []}', '{"passes": [[1, [[1, 1]]]]}'],
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
    busy = source(target, tmp_path, clock).read(chain)
    pace = 1.0
    quiet = source(target, tmp_path, clock).read(chain)
    pace = 4.0
    later = source(target, tmp_path, clock)
    assert busy is not None and quiet is not None
    assert busy.passing(1, 7) == pytest.approx(4 * quiet.passing(1, 7))
    assert later.read(chain) == quiet == Prices.of_json(json.loads(later.path.read_text()))


def test_prices_of_drafts_are_tried_too(clock: Clock, tmp_path: Path) -> None:
    """The target's passes tell nothing of a draft that was timed beside other work."""
    pace = 4.0
    target, draft = scripted(clock, lambda nodes: 1e-3), scripted(clock, lambda nodes: pace * 2e-4)
    drafter = compose("draft-model", target, draft=draft).drafter
    busy = measured(target, drafter, tmp_path, clock)
    pace = 1.0
    quiet = measured(target, drafter, tmp_path, clock)
    pace = 4.0
    assert busy is not None and quiet is not None and measured(target, drafter, tmp_path, clock) == quiet
    assert (busy.drafting(1, 4) or 0) == pytest.approx(4 * (quiet.drafting(1, 4) or 0)) != 0


def test_prices_are_tried_once_in_a_process(clock: Clock, tmp_path: Path) -> None:
    """Whoever asks for a method that was asked for before makes nobody wait. What rounds contradict is measured anew."""
    target, known = scripted(clock, lambda nodes: 1e-3), KnownPrices()
    first, again = (Rehearsal(target, NullDrafter(), {}, folder=tmp_path, clock=clock, known=known) for _ in range(2))
    found, now = first.read(chain), clock()
    assert again.read(chain) == found is not None and clock() == now
    again.doubt()
    assert first.read(chain) is not None and clock() > now


def test_nothing_is_timed_while_requests_are_served(clock: Clock, tmp_path: Path) -> None:
    """A method that was never timed has the prices of passes, which it shares with those that were."""
    target, known = scripted(clock, lambda nodes: 1e-3), KnownPrices()
    method = lambda name: Rehearsal(target, NullDrafter(), {"method": name}, folder=tmp_path, clock=clock, known=known)  # noqa: E731
    known.is_serving = True
    assert method("a").read(chain) is None and clock() == 0
    known.is_serving = False
    found = method("a").read(chain)
    known.is_serving, now = True, clock()
    assert found is not None and method("b").read(chain) == Prices(found.passes) and clock() == now
    assert not method("b").path.exists()


def test_a_text_to_copy_from_has_no_prices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = list[Any]()
    monkeypatch.setattr(api, "expect_prices", lambda method, target, label, *more: labels.append(label))
    llm = LLM()
    for text in ("a cat", "a dog"):
        llm.compose("reference", references=[text])
    assert labels[-1] == labels[-2] and labels[-1] != labels[0]


def test_a_draft_of_another_type_has_prices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = list[Any]()
    monkeypatch.setattr(api, "expect_prices", lambda method, target, label, *more: labels.append(label))
    for dtype in (None, "int8"):
        api.LLM(method="draft-model", draft_dtype=dtype)
    assert labels[0] != labels[1]


def test_a_slow_model_does_not_try_its_prices(clock: Clock, tmp_path: Path) -> None:
    target = scripted(clock, lambda nodes: 0.03 + 0.005 * nodes)
    known, began = source(target, tmp_path, clock).read(chain), clock()
    assert known is not None and source(target, tmp_path, clock).read(chain) == known and clock() == began


class FakeGraphs:
    """Captured rounds that take what a script says, and a second to capture. Slots hold 32 tokens."""

    depths = range(7)

    def __init__(self, clock: Clock, price: Callable[[int, int], float]) -> None:
        self._clock, self._price = clock, price
        self.captured: list[tuple[int, int]] = []
        self.num_texts: dict[int, int] = {}
        """By slots, the different texts in them while a round ran."""
        self.seats, self.is_held = self, False
        self.target, self._frames = SimpleNamespace(vocab_size=4096), dict[int, Frame]()

    def frame(self, batch_size: int) -> Frame:
        return self._frames.setdefault(batch_size, Frame.empty(batch_size, 32, torch.device("cpu")))

    def is_held_by_another(self, lane: object) -> bool:
        del lane
        return self.is_held

    def round(self, kind: RoundKind) -> SimpleNamespace:
        size = (kind.num_slots, kind.num_guesses)
        if size not in self.captured:
            self.captured.append(size)
            self._clock.now += 0.5
        return SimpleNamespace(launch=lambda: self._pass(*size))

    def _pass(self, batch_size: int, num_guesses: int) -> None:
        self.num_texts[batch_size] = len(self.frame(batch_size).tokens.unique(dim=0))
        self._clock.now += self._price(batch_size, num_guesses)


@pytest.fixture
def device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Events that read the clock."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock()

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setitem(rehearsal._BUDGET, "cpu", 8.0)
    return clock


def captured_price(slots: int, guesses: int) -> float:
    return 4e-3 + 1e-5 * slots * (1 + guesses) + 3e-4 * guesses


def of_graphs(clock: Clock, folder: Path, graphs: FakeGraphs) -> Rehearsal:
    target = scripted(clock, lambda nodes: pytest.fail("the host ran a pass"))
    return Rehearsal(target, NullDrafter(), {"method": "a"}, lambda: graphs, folder, clock)  # type: ignore[arg-type, return-value]


def test_captured_rounds_are_priced_as_a_whole(device: Clock, tmp_path: Path) -> None:
    graphs = FakeGraphs(device, captured_price)
    prices = of_graphs(device, tmp_path, graphs).read(chain)
    assert prices is not None and set(graphs.captured) == {(slots, k) for slots in (1, 8, 64) for k in (0, 1, 2, 4)}
    for slots in (1, 2, 8, 32, 64, 128):
        for guesses in (0, 1, 3, 4, 6):
            assert prices.passing(slots, guesses) == pytest.approx(captured_price(slots, guesses))
            assert prices.drafting(slots, guesses) == 0.0


def test_slots_hold_different_texts_while_they_are_timed(device: Clock, tmp_path: Path) -> None:
    """Slots with the same text would choose the same experts, and a mixture of experts would look cheap."""
    graphs = FakeGraphs(device, captured_price)
    of_graphs(device, tmp_path, graphs).read(chain)
    assert graphs.num_texts == {1: 1, 8: 8, 64: 64}
    assert not any(graphs.frame(slots).tokens.any() for slots in (1, 8, 64)), "they wake no experts in other rounds"


def test_capturing_ends_in_time_and_every_number_of_slots_is_timed_first(device: Clock, tmp_path: Path) -> None:
    graphs = FakeGraphs(device, lambda slots, guesses: 0.3)
    prices = of_graphs(device, tmp_path, graphs).read(chain)
    assert prices is not None and [rows for rows, _ in prices.passes] == [1, 8, 64] and len(graphs.captured) < 12
    assert device() < 12


def test_kept_prices_of_captured_rounds_are_tried(device: Clock, tmp_path: Path) -> None:
    pace = 4.0
    price = lambda slots, guesses: pace * captured_price(slots, guesses)  # noqa: E731
    busy = of_graphs(device, tmp_path, FakeGraphs(device, price)).read(chain)
    pace = 1.0
    quiet = of_graphs(device, tmp_path, FakeGraphs(device, price)).read(chain)
    graphs = FakeGraphs(device, price)
    assert of_graphs(device, tmp_path, graphs).read(chain) == quiet and graphs.captured == [(1, 0), (1, 4)]
    assert busy is not None and quiet is not None and busy.passing(8, 2) == pytest.approx(4 * quiet.passing(8, 2))


def test_slots_in_use_are_not_timed(device: Clock, tmp_path: Path) -> None:
    graphs = FakeGraphs(device, captured_price)
    graphs.is_held = True
    assert of_graphs(device, tmp_path, graphs).read(chain) is None and not graphs.captured


def test_a_price_source_does_not_keep_its_method() -> None:
    """Captured rounds hold their policy, and must go when their method does."""
    target = TableModel(torch.full((12,), 1 / 12), max_len=1024)
    method = compose("prompt-lookup", target, policy="adaptive")
    expect_prices(method, target, {}, lambda _: None, KnownPrices())
    alive, policy = ref(method), method.policy
    del method
    gc.collect()
    assert alive() is None and policy.start(1) is not None
