"""Tokens that a mask forbids, on the device: in slots that have a grammar and in no other one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_device_tree import frame_of
from triton_interpreter import DEVICE

from outrider.core.device_round import Texts
from outrider.core.device_sampling import Use
from outrider.device.drafters.model.draft_model import DeviceChain
from outrider.device.sampling.masks import forbid, mask_bytes
from outrider.engine.constrained import packed_masks
from outrider.models.gpu.decoder import FastDecoder
from outrider.models.random_decoder import tiny_config, tiny_weights


class Table:
    """A grammar whose states are rows of a table."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def initial(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return state if self._rows[state, token] else None

    def allowed(self, state: int, vocab_size: int) -> torch.Tensor:
        return self._rows[state, :vocab_size]

    def forced(self, state: int) -> tuple[int, ...]:
        return ()


def test_forbidden_tokens_have_no_probability() -> None:
    vocab_size, draw = 1500, torch.Generator().manual_seed(0)
    rows = torch.rand(3, vocab_size, generator=draw) < 0.3
    logits = torch.randn(2, 3, vocab_size + 5, generator=draw).to(DEVICE)
    masks = packed_masks(Table(rows), [0, 1, 2], vocab_size)
    assert masks.shape[1] == mask_bytes(vocab_size)
    expected = logits.clone()
    expected[1, :, :vocab_size] = expected[1, :, :vocab_size].masked_fill(~rows.to(DEVICE), -torch.inf)
    uses = torch.tensor([int(Use.PENALTIES), int(Use.GRAMMAR | Use.BIAS)], dtype=torch.int32, device=DEVICE)
    forbid(logits, masks.expand(2, -1, -1).contiguous().to(DEVICE), uses, vocab_size=vocab_size)
    assert torch.equal(logits, expected)


def test_a_chain_whose_guesses_were_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model has keys of its own guesses; what was accepted in their place is read before it goes on."""
    config = tiny_config(head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    model = FastDecoder(config, tiny_weights(config, device=str(DEVICE)), page_len=4)
    rows, drafter, fresh = [[7, 2], [2, 8]], DeviceChain(model, vocab_size=64), DeviceChain(model, vocab_size=64)
    drafter.seat(Texts([0, 1], rows), batch_size=2)
    drafter.grow({0: 16, 1: 16}, batch_size=2)
    chain = torch.tensor([[row[-1], 0, 0] for row in rows], device=DEVICE)
    drafter.propose(frame_of(rows, [0.0, 0.9]), chain, chain.shape[1] - 1)
    accepted = [(int(first) + 1) % 64 for first in chain[:, 1]]
    rows = [[*row, token, 4, 9] for row, token in zip(rows, accepted, strict=True)]  # not what was guessed
    fresh.seat(Texts([0, 1], rows), batch_size=2)
    fresh.grow({0: 16, 1: 16}, batch_size=2)
    frame, chain = frame_of(rows, [0.0, 0.9]), torch.tensor([[row[-1], 0, 0] for row in rows], device=DEVICE)
    expected, hidden, fed = chain.clone(), model.hidden, list[list[int]]()
    fresh.propose(frame, expected, expected.shape[1] - 1)
    monkeypatch.setattr(model, "hidden", lambda tokens, *more: fed.append(tokens[0].tolist()) or hidden(tokens, *more))
    drafter.propose(replace(frame, is_constrained=True), chain, chain.shape[1] - 1)
    assert torch.equal(chain, expected) and fed[0] == rows[0][2:]
