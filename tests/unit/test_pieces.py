"""How much of a prompt is read between two rounds, from given times: nothing here depends on speed."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.core.errors import OptionError
from outrider.core.reason import ReasonCode
from outrider.core.request import RequestState
from outrider.engine.job import Job, Slots
from outrider.engine.pieces import PieceSizes
from outrider.engine.scheduler import Scheduler


def test_a_piece_takes_so_many_rounds() -> None:
    pieces = PieceSizes(Slots(prefill_tokens=512, reading_rounds=2.0))
    assert pieces.size == 64, "nothing was measured yet"
    pieces.was_read(64, 0.064)
    pieces.was_run(0.02)
    assert pieces.size == 40
    assert pieces.per_row(pieces.size, 3) == 13 and pieces.per_row(pieces.size, 100) == 1
    pieces.was_run(0.0)
    pieces.was_read(0, 1.0)
    assert pieces.size_alone == 160 and pieces.size == 40, "where nobody runs, a piece is waited for once"
    pieces.was_run(0.02)
    assert pieces.size_alone == pieces.size == 40, "a round of nobody and a piece of nothing say nothing"


def test_a_piece_is_neither_endless_nor_empty() -> None:
    pieces = PieceSizes(Slots(prefill_tokens=100, reading_rounds=2.0))
    pieces.was_read(1, 1e-6)
    pieces.was_run(1.0)
    assert pieces.size == 100
    pieces = PieceSizes(Slots(prefill_tokens=100, reading_rounds=2.0))
    pieces.was_read(1, 10.0)
    pieces.was_run(0.001)
    assert pieces.size == 2


@pytest.mark.parametrize(("pass_s", "token_s"), [(0.0, 0.001), (0.002, 0.001), (0.02, 0.0002), (0.019, 0.00005)])
def test_sizes_settle_where_time_and_weights_allow(pass_s: float, token_s: float) -> None:
    """A plain round takes 20 ms. Where reading the weights takes as long, pieces do not shrink to nothing."""
    pieces = PieceSizes(Slots(prefill_tokens=512, reading_rounds=1.0))
    pieces.was_run(0.02)
    sizes = list[int]()
    for _ in range(200):
        sizes.append(pieces.size)
        pieces.was_read(sizes[-1], pass_s + token_s * sizes[-1])
    took = [pass_s + token_s * size for size in sizes[100:]]
    assert max(took) <= 1.6 * max(0.02, pass_s) and min(sizes[100:]) >= 0.4 * max(0.02 - pass_s, pass_s / 2) / token_s


def test_without_a_limit_all_is_read() -> None:
    pieces = PieceSizes(Slots(prefill_tokens=512))
    pieces.was_read(1, 10.0)
    assert pieces.size == 512 and pieces.per_row(512, 9) == 512
    with pytest.raises(OptionError, match="reading_rounds"):
        Slots(reading_rounds=0)


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    """Prompts are read in turns: the short one, which came second, has its text first, and both texts are as alone."""
    llm = LLM(method="plain")
    params = SamplingParams(max_tokens=4, temperature=1, seed=3, ignore_eos=True)
    prompts = ["the cat and the dog " * 60, "Once upon a time"]
    alone = [output.token_ids for output in llm.generate(prompts, params)]
    scheduler = Scheduler(llm.target, lambda _: llm.method, slots=Slots(prefill_tokens=40))
    states = [RequestState.of(request) for request in llm.requests(prompts, params)]
    finished: list[int] = []
    scheduler.submit(Job(0, states[0], ""))
    scheduler.round()
    scheduler.submit(Job(1, states[1], ""))
    while not scheduler.is_idle:
        finished += [n for report in scheduler.round() for n, s in zip(report.ids, report.states, strict=True) if s.is_finished]
    assert finished == [1, 0] and [list(state.output_ids) for state in states] == alone


def test_a_draft_model_reads_a_long_prompt_in_pieces_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round waits for a draft that reads all of a prompt. The short request is drafted for meanwhile; texts are as alone.
    Alone, a request's prompt is read in larger pieces."""
    llm = LLM(method="draft-model", num_draft_tokens=3)
    params = [SamplingParams(max_tokens=count, temperature=1, seed=3, ignore_eos=True) for count in (60, 12)]
    prompts = ["Once upon a time", "the cat and the dog " * 60]
    alone = [output.token_ids for output in llm.generate(prompts, params)]
    draft, sizes, drafted = llm.drafts[0], list[int](), list[tuple[int, ...]]()
    read = draft.prefill

    def prefill(rows: list[list[int]], *given: object, **named: object) -> object:
        sizes.append(sum(map(len, rows)))
        return read(rows, *given, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(draft, "prefill", prefill)
    scheduler = Scheduler(llm.target, lambda _: llm.method, slots=Slots(prefill_tokens=64, reading_rounds=1e6))
    states = [RequestState.of(request) for request in llm.requests(prompts, params)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state, ""))
    while not scheduler.is_idle:
        drafted += [report.drafted for report in scheduler.round() if len(report.ids) == 2]
    assert [list(state.output_ids) for state in states] == alone
    assert drafted and drafted[0][1] == 0 < drafted[0][0], "the long one is not drafted for yet"
    assert max(sizes) <= 4 * 64 and sum(sizes) > 200, "the draft read the long prompt"


def test_a_request_alone_is_told_that_its_prompt_is_read() -> None:
    llm = LLM(method="draft-model", num_draft_tokens=3)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (request,) = llm.requests([[5] * 700], params)
    state, reasons = RequestState.of(request), list[ReasonCode]()
    scheduler = Scheduler(llm.target, lambda _: llm.method, slots=Slots(reading_rounds=1e6))
    scheduler.submit(Job(0, state, ""))
    while not scheduler.is_idle:
        reasons += [plan.reason.code for report in scheduler.round() if (plan := report.seen.plan) and plan.reason]
    assert reasons[0] is ReasonCode.READING and reasons[1] is ReasonCode.GIVEN
