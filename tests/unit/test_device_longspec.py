"""LongSpec in a captured round against its twin: the same trees from the window and from the target's pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_device_heads import SHAPE, TEMPERATURES, small_head
from test_device_tree import frame_of
from triton_interpreter import DEVICE

from outrider.cache.paged import PagedCache
from outrider.core.device_round import CapturedShape, Frame, LateTexts, PromptPieces, Texts
from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.core.tree import TokenTree
from outrider.device.drafters.heads.longspec import DeviceLongSpec
from outrider.drafters.heads.head_options import HeadOptions
from outrider.drafters.heads.longspec import LongSpec
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.heads.longspec import LongSpecHead
from outrider.models.random_decoder import tiny_config, tiny_weights

ROWS = [[5, 9, 1, 33, 7, 2, 40, 11, 12], [2, 8]]
"""The first is longer than the window, the second shorter than what is read again."""


@pytest.fixture(scope="module")
def target() -> FastDecoder:
    config = tiny_config(**SHAPE)
    return FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=4)


def drafter_of(branching: str | None, *, window: int = 5) -> LongSpec:
    head = small_head("longspec")
    assert isinstance(head, LongSpecHead) and head.window == 5
    head.window = window
    return LongSpec(head, HeadOptions(branching=branching))


def seated(target: FastDecoder, rows: list[list[int]]) -> tuple[Frame, PagedCache]:
    """A frame whose slots stand in pages of the target, which hold any numbers, and these pages."""
    cache = target.new_cache(len(rows))
    cache.reserve_each([len(row) for row in rows])
    cache.lengths = [len(row) - 1 for row in rows]
    target.pool.block.normal_(generator=torch.Generator(DEVICE).manual_seed(3))
    frame = frame_of(rows, TEMPERATURES, capacity=max(64, *map(len, rows)))
    return replace(frame, pages=cache.table()), cache


def expected(drafter: LongSpec, cache: PagedCache, frame: Frame, rows: list[list[int]], plan: Plan) -> TokenTree:
    states = [RequestState.of(Request(r[:-1], SamplingParams(temperature=t))) for r, t in zip(rows, TEMPERATURES, strict=True)]
    for state, row in zip(states, rows, strict=True):
        state.output_ids.append(row[-1])
    noise = Noise(frame.seeds, frame.lengths - frame.prompt_lens)
    context = Context(rows, Sampler(states, 64, DEVICE), noise, DEVICE, cache)
    with torch.inference_mode():
        return drafter.propose(drafter.start(rows, {}), context, plan).tree


def test_the_tree_of_its_twin_grows_in_later_rounds_too(target: FastDecoder) -> None:
    drafter = drafter_of("2,1")
    twin = drafter.device_twin(CapturedShape({2: 4}), target)
    assert twin is not None and twin.max_depth == 2
    rows = ROWS
    twin.seat(Texts([0, 1], rows), batch_size=2)
    for _ in range(2):
        frame, cache = seated(target, rows)
        nodes = torch.zeros(2, twin.num_nodes(2), dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        with torch.inference_mode():
            twin.propose(frame, nodes, 2)
        assert torch.equal(nodes, expected(drafter, cache, frame, rows, Plan((2, 2), (4, 4))).tokens)
        rows = [[*rows[0], 17, 3, 60], [*rows[1], 21]]  # a round adds three tokens at most


def held(twin: DeviceLongSpec, *, slot: int, length: int) -> torch.Tensor:
    """Keys and values of the last tokens that a slot's text of this length sees."""
    places, size = torch.arange(length - twin.head.window, length, device=DEVICE), twin.memory[0].shape[2]
    pages = twin._pages.table(2)[slot, places // size].long()
    return torch.stack([part[pages, :, places % size] for part in twin.memory])


def test_prompts_are_read_in_pieces_and_tokens_of_rounds_without_guesses_later(target: FastDecoder) -> None:
    row, found = [(7 * place) % 61 for place in range(230)], list[tuple[list[list[int]], torch.Tensor]]()
    rows = [ROWS[1], row]
    frame, _cache = seated(target, rows)  # whose pages are free when nobody holds it
    for way in ("seated", "in pieces", "caught up"):
        twin = drafter_of("chain").device_twin(CapturedShape({1: 1}), target)
        assert isinstance(twin, DeviceLongSpec)
        nodes = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
        nodes[:, 0] = torch.tensor([each[-1] for each in rows])
        twin.seat(Texts([0], rows[:1]), batch_size=2)
        with torch.inference_mode():
            if way == "in pieces":
                twin.open([1], batch_size=2)
                twin.grow({1: len(row)}, batch_size=2)
                for starts in ([0, 128, 96, 64, 32, 0], [0, 224, 192, 160]):  # more in a round than the ring holds
                    slots = [-1, *[1] * (len(starts) - 1)]
                    twin.read(frame, PromptPieces(*torch.tensor([slots, starts], device=DEVICE)), None)
            else:
                twin.seat(Texts([1], [row if way == "seated" else row[:20]]), batch_size=2)
                if way == "caught up":
                    twin.catch_up(LateTexts([1], [row], [20], [len(row) - 20]), batch_size=2)
            twin.propose(frame, nodes, 1)
        found.append((nodes.tolist(), held(twin, slot=1, length=len(row))))
    assert found[0][0] == found[1][0] == found[2][0]
    for _, entries in found[1:]:
        torch.testing.assert_close(entries, found[0][1])


@pytest.mark.parametrize(("window", "num_pages"), [(5, 1), (70, 2)])
def test_a_ring_of_pages_holds_what_is_seen_of_a_long_text(target: FastDecoder, window: int, num_pages: int) -> None:
    """Trees past the window are the twin's in every round, while the ring is written over, beside a text that is short."""
    drafter = drafter_of(None, window=window)
    twin = drafter.device_twin(CapturedShape({2: 4}), target)
    assert isinstance(twin, DeviceLongSpec)
    pages = twin._pages
    rows = [[(7 * place) % 61 for place in range(187)], [2, 8]]
    twin.seat(Texts([0, 1], rows), batch_size=2)
    nodes = torch.zeros(2, twin.num_nodes(2), dtype=torch.int64, device=DEVICE)
    for number in range(4):
        reaches = {slot: len(row) + 10 for slot, row in enumerate(rows)}
        assert twin.has_room(reaches, batch_size=2)
        twin.grow(reaches, batch_size=2)
        owned = [set(row.tolist()) - {pages.spare_page} for row in pages.table(2)]
        assert list(map(len, owned)) == [num_pages, 1, 0] and not owned[0] & owned[1]
        frame, cache = seated(target, rows)
        nodes[:, 0] = torch.tensor([row[-1] for row in rows])
        with torch.inference_mode():
            twin.propose(frame, nodes, 2)
        assert torch.equal(nodes, expected(drafter, cache, frame, rows, Plan((2, 2), (4, 4))).tokens), number
        rows = [[*rows[0], 17, 3, 60], [*rows[1], 21]]
    late = [*rows[0], *range(30)]
    twin.catch_up(LateTexts([0], [late], [len(rows[0])], [30]), batch_size=2)
    frame, cache = seated(target, [late, rows[1]])
    nodes[:, 0] = torch.tensor([late[-1], rows[1][-1]])
    with torch.inference_mode():
        twin.propose(frame, nodes, 2)
    assert torch.equal(nodes, expected(drafter, cache, frame, [late, rows[1]], Plan((2, 2), (4, 4))).tokens)
