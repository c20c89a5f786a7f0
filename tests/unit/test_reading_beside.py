"""Prompts inside the passes of rounds on the host: nobody waits for a pass of its own, and nothing but time depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiers import in_turn

from outrider import LLM, SamplingParams
from outrider.core.interfaces import Cache
from outrider.core.reading_target import PromptPiece, ReadingTarget
from outrider.core.request import RequestState
from outrider.core.scores import Scores
from outrider.core.tree import TokenTree
from outrider.engine.job import Job, Slots
from outrider.engine.pieces import PieceSizes
from outrider.engine.scheduler import Scheduler

LONG = "the cat and the dog " * 40
PROMPTS = ["Once upon a time", LONG, "Tom and his dog", LONG + "sat", "One day, a little girl"]


def served(llm: LLM, states: Sequence[RequestState], slots: Slots, *, every: int = 3) -> list[list[int]]:
    """The texts of requests of which one comes every few rounds."""
    scheduler, waiting = Scheduler(llm.target, lambda _: llm.method, slots=slots, isolates=False), list(enumerate(states))
    while waiting or not scheduler.is_idle:
        if waiting:
            scheduler.submit(Job(*waiting.pop(0)))
        for _ in range(every):
            scheduler.round()
    scheduler.check_integrity()
    return [list(state.output_ids) for state in states]


SLOTS = (Slots(), Slots(prefill_tokens=24), Slots(max_rows=2, prefill_tokens=100, reading_rounds=1e6))


@pytest.mark.parametrize(
    ("method", "slots"), in_turn(("plain", "draft-model", "prompt-lookup", "early-exit", "best-first"), SLOTS)
)
def test_texts_are_those_of_requests_alone(method: str, slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """However prompts are cut, and in whatever order requests come."""
    llm = LLM(method=method, **({} if method == "plain" else {"num_draft_tokens": 3}))
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    alone = [output.token_ids for output in llm.generate(PROMPTS, params)]
    assert isinstance(llm.target, ReadingTarget)
    read, sizes = llm.target.score_and_read, list[int]()

    def score_and_read(tree: TokenTree, cache: Cache, pieces: Sequence[PromptPiece], **named: Any) -> Scores:
        sizes.append(sum(piece.num_tokens for piece in pieces))
        return read(tree, cache, pieces, **named)

    monkeypatch.setattr(llm.target, "score_and_read", score_and_read)
    order = [2, 0, 4, 1, 3]
    states = [RequestState.of(request) for request in llm.requests([PROMPTS[n] for n in order], params)]
    assert served(llm, states, slots) == [alone[n] for n in order]
    assert sizes and max(sizes) <= slots.prefill_tokens, "prompts were read beside those who run"


def test_a_pass_that_reads_scores_and_taps_alike() -> None:
    """The same bits as passes apart, for trees and chains, and for prompts in several pieces."""
    target = LLM(method="plain").target
    assert isinstance(target, ReadingTarget)
    taps, texts = (1, target.num_layers), [list(range(5, 45)), list(range(7, 14))]
    trees = [
        TokenTree.of_rows([([4, 8, 15], [-1, 0, 0]), ([16], [-1])]),
        TokenTree.chain(torch.tensor([[23, 42], [4, 0]]), [2, 1]),
    ]
    for tree in trees:
        cache, apart = target.new_cache(2), target.new_cache(2)
        for one in (cache, apart):
            target.prefill([[1, 2, 3], [4, 5]], one)
        expected, states = target.score(tree, apart, taps=taps), target.prefill(texts, target.new_cache(2), taps=taps)
        piece = PromptPiece(texts, target.new_cache(2), taps)
        other = PromptPiece([[9, 9, 9]], target.new_cache(1))
        scores = target.score_and_read(tree, cache, [piece, other], taps=taps)
        assert piece.states is not None and other.states == {} and piece.num_tokens == 47
        assert cache.lengths == [3, 2] and piece.cache.lengths == [40, 7] and other.cache.lengths == [3]
        for row, size in enumerate(tree.sizes):
            assert torch.equal(scores.logits[row, :size], expected.logits[row, :size])
            for tap in taps:
                assert torch.equal(scores.taps[tap][row, :size], expected.taps[tap][row, :size])
                assert torch.equal(piece.states[tap][row], states[tap][row])


def test_a_failing_pass_lets_pieces_be_read_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run keep their texts, and the one whose prompt was to be read has its own."""
    llm = LLM(method="plain")
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    alone = [output.token_ids for output in llm.generate(PROMPTS[:2], params)]

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no pass with prompts today")

    monkeypatch.setattr(llm.target, "score_beside", refuse)
    scheduler = Scheduler(llm.target, lambda _: llm.method)
    states = [RequestState.of(request) for request in llm.requests(PROMPTS[:2], params)]
    for number, state in enumerate(states):
        scheduler.submit(Job(number, state))
        scheduler.round()
    while not scheduler.is_idle:
        scheduler.round()
    assert [list(state.output_ids) for state in states] == alone


def test_pieces_beside_are_measured_by_what_they_add() -> None:
    pieces = PieceSizes(Slots(reading_rounds=2.0))
    assert pieces.size_beside == 64 and pieces.share_of(30, 10) == 0.75, "nothing was measured yet"
    pieces.was_run(0.02, 0)
    for num_tokens in (64, 32, 64, 32):
        pieces.was_run(0.02 + 0.001 * num_tokens, num_tokens)
    assert pieces.size_beside == pytest.approx(40, abs=1) and pieces.share_of(20, 10) == pytest.approx(0.5)
    pieces.was_run(0.001, 64)
    assert pieces.share_of(64, 1) > 0, "a fast round does not make prompts free"
