"""How much of a prompt is read between two rounds, from given times: nothing here depends on speed."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.core.errors import OptionError
from outrider.core.request import RequestState
from outrider.engine.job import Job, Slots
from outrider.engine.pieces import Pieces
from outrider.engine.scheduler import Scheduler


def test_a_piece_takes_so_many_rounds() -> None:
    pieces = Pieces(Slots(prefill_tokens=512, reading_rounds=2.0))
    assert pieces.size(is_alone=False) == 64, "nothing was measured yet"
    pieces.was_read(64, 0.064)
    pieces.was_run(0.02)
    assert pieces.size(is_alone=False) == 40
    assert pieces.size(is_alone=True) == 50
    pieces.was_run(0.0)
    pieces.was_read(0, 1.0)
    assert pieces.size(is_alone=False) == 40, "a round of nobody and a piece of nothing say nothing"


def test_a_piece_is_neither_endless_nor_empty() -> None:
    pieces = Pieces(Slots(prefill_tokens=100, reading_rounds=2.0))
    pieces.was_read(1, 1e-6)
    pieces.was_run(1.0)
    assert pieces.size(is_alone=False) == 100
    pieces = Pieces(Slots(prefill_tokens=100, reading_rounds=2.0))
    pieces.was_read(1, 10.0)
    pieces.was_run(0.001)
    assert pieces.size(is_alone=False) == pieces.size(is_alone=True) == 2


def test_without_a_limit_all_is_read() -> None:
    pieces = Pieces(Slots(prefill_tokens=512))
    pieces.was_read(1, 10.0)
    assert pieces.size(is_alone=False) == 512
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
