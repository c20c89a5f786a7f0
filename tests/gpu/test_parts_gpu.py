"""Attention in parts on a GPU: the fused kernel's log-sum-exps merge as those that are written out."""

from __future__ import annotations

import pytest
import torch

from outrider.models.attention.parts import attend_part, merged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_slots", [7, 300, 5000])
def test_the_fused_part_is_the_written_one(num_slots: int) -> None:
    torch.manual_seed(0)
    queries = torch.randn(2, 8, 5, 64, device="cuda").bfloat16()
    keys, values = (torch.randn(2, 2, num_slots, 64, device="cuda").bfloat16() for _ in range(2))
    fused = attend_part(queries, keys, values, scale=0.125)
    plain = attend_part(queries.float(), keys.float(), values.float(), scale=0.125)
    torch.testing.assert_close(fused.seen.float(), plain.seen, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(fused.weight, plain.weight, atol=2e-2, rtol=1e-3)
    near = torch.randn(2, 2, 5, 64, device="cuda").bfloat16()
    sight = torch.ones(2, 5, 5, dtype=torch.bool, device="cuda").tril()
    both = merged(fused, attend_part(queries, near, near, scale=0.125, sight=sight))
    wanted = merged(plain, attend_part(queries.float(), near.float(), near.float(), scale=0.125, sight=sight))
    torch.testing.assert_close(both.float(), wanted, atol=2e-2, rtol=2e-2)
