"""Pages of slots in captured rounds: texts take what they are long, and many are seated with the copies that one takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

import outrider.device.slot_pages as pages_module
import outrider.engine.captured_rounds as graphs_module
from outrider.cache.page_pool import PagePool
from outrider.core.device_round import CapturedShape, PromptPieces
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.device.drafters.heads.eagle import Memory
from outrider.device.slot_pages import SlotPages
from outrider.engine.captured_rounds import RoundGraphs
from outrider.engine.device_seats import Seat
from outrider.methods import compose
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.gpu.uploads import sent
from outrider.models.random_decoder import tiny_config, tiny_weights

SHAPE: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


def new_pages(longest: int = 4096) -> SlotPages:
    return SlotPages(PagePool((1, 1, 16), dtype=torch.float32, device=DEVICE), longest=longest)


def test_a_long_text_beside_short_ones_takes_the_sum_of_their_lengths() -> None:
    pages, lengths = new_pages(), {0: 4000} | dict.fromkeys(range(1, 17), 50)
    pages.open(range(17), batch_size=32)
    pages.grow(lengths, batch_size=32)
    assert pages.pool.num_used == 1 + 63 + 16, "and the spare page"
    table = pages.table(32)
    owned = [page for slot, length in lengths.items() for page in table[slot, : -(-length // 64)].tolist()]
    spare = int(table[32, 0])
    assert len(set(owned)) == 79 and spare not in owned and set(table[1, 1:].tolist()) == {spare}
    pages.move(32, 8, [0, 3])
    assert pages.pool.num_used == 1 + 63 + 1 and set(table.flatten().tolist()) == {spare}
    assert pages.table(8)[:2, 0].tolist() == [owned[0], owned[65]], "nothing is copied"
    pages.release(8, [0, 1, 5])
    assert pages.pool.num_used == 1 and set(pages.table(8).flatten().tolist()) == {spare}


def test_an_eagle_head_keeps_the_targets_states_beside_its_pages() -> None:
    memory = Memory(torch.zeros(1, device=DEVICE), tiny_config(max_position_embeddings=4096, **SHAPE), width=12)
    memory.pages.open([1], batch_size=2)
    memory.pages.grow({1: 100}, batch_size=2)
    places = memory.pages.places([1], [100], batch_size=2)
    memory.states[torch.tensor(places)] = torch.arange(100.0)[:, None].expand(-1, 12)
    pieces = PromptPieces(*torch.tensor([[1, -1], [64, 0]], device=DEVICE))
    rows = memory.pages.piece_rows(pieces, 2)
    found = memory.states[memory.at(rows, pieces.columns())]
    assert found[0, :, 0].tolist() == list(range(64, 96)) and not found[1].any()
    assert len(memory.states) == memory.pages.pool.num_pages * memory.pages.pool.page_len
    memory.pages.grow({1: 2000}, batch_size=2)
    assert len(memory.states) == memory.pages.pool.num_pages * memory.pages.pool.page_len
    assert memory.states[torch.tensor(places), 0].tolist() == list(range(100)), "they move with the pool"


def test_many_requests_take_slots_with_the_copies_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**SHAPE)
    target = FastDecoder(config, tiny_weights(config, device=str(DEVICE)))
    graphs = RoundGraphs(target, None, compose("plain", target).policy, CapturedShape({}))
    copies, counts = list[int](), list[int]()
    for place in (graphs_module, pages_module):
        monkeypatch.setattr(place, "sent", lambda *given: copies.append(1) or sent(*given))
    for size in (1, 3, 7):
        states = [RequestState.of(Request([5 + n, *range(70 + 9 * n)], SamplingParams(max_tokens=4))) for n in range(size)]
        copies.clear()
        graphs.seat(8, {slot: Seat(slot, state) for slot, state in enumerate(states)})
        graphs.start(8, dict(enumerate(states)))
        graphs.stop(8, range(size))
        counts.append(len(copies))
        frame = graphs.frame(8)
        for slot, state in enumerate(states):
            assert frame.tokens[slot, : len(state.tokens)].tolist() == state.tokens
        assert frame.seeds[:size].tolist() == [state.seed for state in states] and not frame.limits.any()
    assert len(set(counts)) == 1
