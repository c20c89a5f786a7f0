"""The parts of a captured round against their twins: choice, walk and commit, prompt lookup, the draft model's chain."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.cache.paged import PagedCache
from outrider.core.device_round import PIECE_LEN, Frame, LateTexts, PromptPieces, Texts
from outrider.core.rng import Noise
from outrider.core.tree import TokenTree
from outrider.device.acceptance.coupled import NOTE, RING, chain_parents, walk_and_commit
from outrider.device.drafters.copying.prompt_lookup import DeviceLookup
from outrider.device.drafters.model.draft_model import DeviceChain
from outrider.device.sampling.choose import block_bests
from outrider.device.slot_pages import SlotPages
from outrider.drafters.copying.prompt_lookup import NgramIndex, PromptLookupOptions
from outrider.models.attention.tree_tiles import Sights
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights


def frame_of(rows: list[list[int]], *, prompt_lens: list[int], temperatures: list[float], capacity: int = 64) -> Frame:
    frame = Frame.empty(len(rows), capacity, DEVICE)
    for slot, row in enumerate(rows):
        frame.tokens[slot, : len(row)] = torch.tensor(row)
    frame.lengths.copy_(torch.tensor([len(row) for row in rows]))
    frame.limits.fill_(capacity)
    frame.prompt_lens.copy_(torch.tensor(prompt_lens))
    frame.seeds.copy_(torch.tensor([7, -3][: len(rows)]))
    frame.temperatures.copy_(torch.tensor(temperatures))
    return frame


def choices_of(logits: torch.Tensor, frame: Frame) -> torch.Tensor:
    """The oracle: what ``Law.choices`` says on a chain."""
    depths = torch.arange(logits.shape[1], device=DEVICE).expand(logits.shape[:2])
    noise = Noise(frame.seeds, frame.lengths - frame.prompt_lens).target_gumbel(depths, logits.shape[2])
    temperatures = frame.temperatures[:, None, None]
    perturbed = logits / torch.where(temperatures == 0, 1.0, temperatures) + noise
    return torch.where(temperatures[..., 0] == 0, logits.argmax(-1), perturbed.argmax(-1))


def test_walk_and_commit() -> None:
    generator = torch.Generator().manual_seed(0)
    frame = frame_of([[1, 2, 3], [4, 5]], prompt_lens=[2, 2], temperatures=[0.0, 0.8])
    logits = torch.randn(2, 4, 3000, generator=generator).to(DEVICE)
    expected = choices_of(logits, frame)
    chain = torch.cat((torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), expected[:, :3]), 1)
    chain[0, 3] = (chain[0, 3] + 1) % 3000  # row 0: two right, one wrong
    chain[1, 2:] = -1  # row 1: one right, nothing after it
    ring, rounds = (
        torch.zeros(RING, 2, NOTE + 4, dtype=torch.int64, device=DEVICE),
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
    )
    bests = block_bests(logits, frame, vocab_size=3000)
    walk_and_commit(bests, chain, frame, parents=chain_parents(2, 4, DEVICE), ring=ring, rounds=rounds)
    assert ring[0, :, :NOTE].tolist() == [[3, 3, 2, 1], [2, 1, 1, 0]]
    for row, count in enumerate((3, 2)):
        assert ring[0, row, NOTE : NOTE + count].tolist() == expected[row, :count].tolist()
    assert frame.lengths.tolist() == [6, 4] and rounds.tolist() == [1, 1]
    assert frame.tokens[0, 3:6].tolist() == expected[0, :3].tolist()
    assert frame.tokens[1, 2:4].tolist() == expected[1, :2].tolist()
    assert frame.tokens[1, 4] == 0


def test_a_limit_cuts_the_run_and_then_holds_the_slot() -> None:
    frame = frame_of([[1, 2, 3]], prompt_lens=[3], temperatures=[0.0])
    frame.limits.fill_(4)
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    best = logits.argmax(-1)
    chain = torch.cat((torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), best[:, :2]), 1)
    ring, rounds = (
        torch.zeros(RING, 1, NOTE + 3, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    for emitted in (1, 0):
        bests = block_bests(logits, frame, vocab_size=50)
        walk_and_commit(bests, chain, frame, parents=chain_parents(1, 3, DEVICE), ring=ring, rounds=rounds)
        assert int(ring[int(rounds) - 1, 0, 0]) == emitted
        assert frame.lengths.tolist() == [4]


def test_the_lowest_token_wins_a_tie() -> None:
    frame = frame_of([[1, 2]], prompt_lens=[2], temperatures=[0.0])
    logits = torch.zeros(1, 1, 5000, device=DEVICE)
    logits[0, 0, [100, 3000, 4999]] = 1.0
    ring, rounds = (
        torch.zeros(RING, 1, NOTE + 1, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    chain = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    bests = block_bests(logits, frame, vocab_size=5000)
    walk_and_commit(bests, chain, frame, parents=chain_parents(1, 1, DEVICE), ring=ring, rounds=rounds)
    assert int(ring[0, 0, NOTE]) == 100


@pytest.mark.parametrize("seed", range(4))
def test_look_up_copies_what_the_index_copies(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[draw.randrange(4) for _ in range(draw.randrange(2, 30))] for _ in range(2)]
    options = PromptLookupOptions(max_ngram=3, min_ngram=1 + seed % 2)
    frame = frame_of(rows, prompt_lens=[1, 1], temperatures=[0.0, 0.0])
    chain = torch.zeros(2, 7, dtype=torch.int64, device=DEVICE)
    DeviceLookup(min_ngram=options.min_ngram, max_ngram=options.max_ngram).propose(frame, chain, chain.shape[1] - 1)
    for row, history in enumerate(rows):
        index = NgramIndex(options)
        index.extend(history)
        assert chain[row, 1:].tolist() == (index.continuation(history, 6) or [-1] * 6)


@pytest.mark.parametrize("page_len", [4, 64])
def test_the_chain_of_a_draft_model(page_len: int) -> None:
    config = tiny_config(head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=page_len)
    rows = [[5, 9, 1, 33, 7], [2, 8, 4]]
    frame = frame_of(rows, prompt_lens=[3, 3], temperatures=[0.0, 0.9])
    drafter = DeviceChain(model, vocab_size=64)
    drafter.seat(Texts([0, 1], rows), batch_size=2)
    chain = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    chain[:, 0] = torch.tensor([row[-1] for row in rows])
    drafter.propose(frame, chain, chain.shape[1] - 1)
    for slot, row in enumerate(rows):
        tokens = torch.tensor([[*row, *chain[slot, 1:].tolist()]], device=DEVICE)
        cache = model.new_cache(1)
        tree = TokenTree.chain(tokens)
        cache.reserve(tree.num_nodes)
        logits = model.forward(tokens, model.step_of(tree, cache))[0][:, len(row) - 1 : -1]
        alone = frame_of([row], prompt_lens=[3], temperatures=[frame.temperatures[slot].item()])
        alone.seeds.fill_(int(frame.seeds[slot]))
        assert choices_of(logits, alone)[0].tolist() == chain[slot, 1:].tolist()


def test_slots_take_pages_as_their_texts_grow_and_give_them_back() -> None:
    config = tiny_config(head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=4)
    drafter = DeviceChain(model, vocab_size=64)
    seats = drafter._pages
    drafter.seat(Texts([1], [[5, 9, 1, 33, 7]]), batch_size=2)
    table, version = seats.table(2), seats.version
    spare = table[0, 0].item()
    assert table.shape == (3, model.most_slots // 4) and set(table[0].tolist()) == {spare}  # an empty slot's tokens go nowhere
    held = model.pool.num_used
    seats.grow({1: 14}, batch_size=2)
    own = table[1, :4].tolist()
    assert len({*own, spare}) == 5 and set(table[1, 4:].tolist()) == {spare} and model.pool.num_used == held + 2
    seats.grow({1: 9}, batch_size=2)  # it reaches that far
    assert table[1, :4].tolist() == own and model.pool.num_used == held + 2
    assert seats.has_room({1: 16, 0: 4 * model.pool.num_free}, batch_size=2)
    assert not seats.has_room({1: 17, 0: 4 * model.pool.num_free}, batch_size=2)
    drafter.seat(Texts([0], [[5, 9]]), batch_size=2)
    assert seats.table(2) is table and seats.version == version and not set(table[0].tolist()) & set(own)
    seats.leave(2)
    assert model.pool.num_used == 1 and set(table.flatten().tolist()) == {spare}


def scored(model: FastDecoder, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of a chain behind a cache."""
    tree = TokenTree.chain(tokens)
    cache.reserve(tree.num_nodes)
    return model.forward(tokens, model.step_of(tree, cache))[0]


def pieces_of(*pieces: tuple[int, int]) -> PromptPieces:
    """Slots, and tokens before each piece."""
    return PromptPieces(*torch.tensor(list(zip(*pieces, strict=True)), device=DEVICE))


@pytest.mark.parametrize("page_len", [16, 64])
def test_prompts_are_read_in_pieces_beside_the_trees_of_others(page_len: int) -> None:
    config = tiny_config(head_dim=16, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=page_len)
    generator = random.Random(page_len)
    rows = [[5, 9, 1, 33, 7], [generator.randrange(64) for _ in range(50)]]
    frame = frame_of(rows, prompt_lens=[3, 50], temperatures=[0.0, 0.0], capacity=128)
    drafter = DeviceChain(model, vocab_size=64)
    seats = drafter._pages
    drafter.seat(Texts([0], [rows[0]]), batch_size=2)
    drafter.open([1], batch_size=2)
    seats.grow({1: 96}, batch_size=2)
    nodes = torch.tensor([[7, 3, 8], [rows[1][-1], 0, 0]], device=DEVICE)
    for pieces in (pieces_of((1, 0), (-1, 0)), pieces_of((-1, 0), (1, PIECE_LEN))):  # the second sees the first's keys
        trees = model.step((2, 3), seats.rows(frame.lengths - 1), Sights(None, None), num_slots=96)
        beside = model.step((2, PIECE_LEN), seats.piece_rows(pieces, 2), Sights(None, None), num_slots=96)
        logits, tapped = model.forward_beside([(nodes, trees), (pieces.tokens(frame), beside)], taps=[1])
        assert tapped[0][1].shape == (2, 3, config.hidden_size) and tapped[1][1].shape == (2, PIECE_LEN, config.hidden_size)
    cache = model.new_cache(1)
    model.prefill([rows[0][:-1]], cache)
    assert torch.allclose(logits[:1], scored(model, nodes[:1], cache), atol=1e-5)
    found, read = seats.cache_of(2, 1, len(rows[1]) - 1), model.new_cache(1)
    model.prefill([rows[1][:-1]], read)
    ending = torch.tensor([[rows[1][-1], 4]], device=DEVICE)
    assert torch.allclose(scored(model, ending, found), scored(model, ending, read), atol=1e-5)


def test_a_slot_begins_with_lent_pages_and_leaves_them_as_they_are() -> None:
    """Two slots go on from one prompt, each in its own way; whoever lent it reads what it read before."""
    config = tiny_config(head_dim=16, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=16)
    prompt = [(7 * place) % 61 + 1 for place in range(37)]
    lender = model.new_cache(1)
    model.prefill([prompt], lender)
    held = lender.pages[0], model.pool.block[:, :, lender.pages[0]].clone()
    rows = [[*prompt, 5, 9, 2], [*prompt, 8, 8, 4]]
    frame = frame_of(rows, prompt_lens=[40, 40], temperatures=[0.0, 0.0], capacity=128)
    seats = SlotPages.of_decoder(model)
    seats.adopt([0, 1], [PagedCache.of_runs(model.pool, [lender.run(0)]) for _ in rows], batch_size=2)
    seats.grow({0: 96, 1: 96}, batch_size=2)
    pieces, nodes = pieces_of((0, 37), (1, 37)), torch.tensor([[2], [4]], device=DEVICE)
    trees = model.step((2, 1), seats.rows(frame.lengths - 1), Sights(None, None), num_slots=96)
    beside = model.step((2, PIECE_LEN), seats.piece_rows(pieces, 2), Sights(None, None), num_slots=96)
    model.forward_beside([(nodes, trees), (pieces.tokens(frame), beside)])
    assert lender.pages[0] == held[0] and torch.equal(model.pool.block[:, :, lender.pages[0]], held[1])
    for slot, row in enumerate(rows):
        found, read = seats.cache_of(2, slot, len(row) - 1), model.new_cache(1)
        model.prefill([row[:-1]], read)
        ending = torch.tensor([[row[-1], 4]], device=DEVICE)
        assert torch.allclose(scored(model, ending, found), scored(model, ending, read), atol=1e-5)


def test_a_draft_model_reads_prompts_in_pieces() -> None:
    config = tiny_config(head_dim=16, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)))
    rows = [[2, 8, 4], [(7 * place) % 61 for place in range(40)]]
    frame = frame_of(rows, prompt_lens=[3, 40], temperatures=[0.0, 0.0], capacity=128)
    chains: list[list[list[int]]] = []
    for in_pieces in (False, True):
        drafter = DeviceChain(model, vocab_size=64)
        drafter.seat(Texts([0], rows[:1]), batch_size=2)
        if in_pieces:
            drafter.open([1], batch_size=2)
            for start in (0, PIECE_LEN):
                drafter.propose(frame, torch.zeros(2, 4, dtype=torch.int64, device=DEVICE), 3)  # a slot that stands still
                drafter.read(frame, pieces_of((-1, 0), (1, start)), None)
        else:
            drafter.seat(Texts([1], rows[1:]), batch_size=2)
        chain = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
        drafter.propose(frame, chain, chain.shape[1] - 1)
        chains.append(chain.tolist())
    assert chains[0] == chains[1]


def test_slots_that_lag_behind_are_read_in_one_pass() -> None:
    config = tiny_config()
    model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=4)
    rows, drafter = [[5, 9, 1, 33, 7], [2, 8, 4, 4, 6, 1, 3, 12, 9]], DeviceChain(model, vocab_size=64)
    seats = drafter._pages
    drafter.seat(Texts([0, 2], [row[:3] for row in rows]), batch_size=4)
    drafter.catch_up(LateTexts([0, 2], rows, [2, 2], [2, 6]), batch_size=4)
    for slot, row in zip((0, 2), rows, strict=True):
        cache, fresh = seats.cache_of(4, slot, len(row) - 1), model.new_cache(1)
        model.prefill([row[:-1]], fresh)
        for mine, other in zip(cache.entries(1), fresh.entries(1), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        assert seats.table(4)[slot, : len(cache.pages[0])].tolist() == cache.pages[0]
