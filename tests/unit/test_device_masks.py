"""Tokens that a mask forbids, on the device: in slots that have a grammar and in no other one."""

from __future__ import annotations

import torch
from triton_interpreter import DEVICE

from outrider.core.device_sampling import Use
from outrider.engine.constrained import packed_masks
from outrider.models.gpu.masks import forbid, mask_bytes


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
