"""The native scans of Mamba-2 and gated delta layers against PyTorch's, their oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrence import check_twins

from outrider.core.tree import TokenTree
from outrider.models.native.build import can_build
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

pytestmark = pytest.mark.skipif(not can_build(), reason="no native build here")
SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "hidden_size": 64},
    "bamba": {"mamba_n_heads": 4, "mamba_d_state": 32, "mamba_n_groups": 1, "hidden_size": 64},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "hidden_size": 64},
    "qwen3_next": {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "hidden_size": 64},
}


def twins(family: str, **changes: object) -> tuple[RecurrentDecoder, RecurrentDecoder]:
    raw = tiny_raw(family, **{**SIZES[family], **changes})
    return random_recurrent(raw, fast=False), random_recurrent(raw)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("family", list(SIZES))
def test_rounds_of_trees_score_as_the_oracle_does(family: str, num_threads: int) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        check_twins(*twins(family), num_rounds=14)
    finally:
        torch.set_num_threads(threads)


def test_bounds_of_time_steps_and_no_bias() -> None:
    plain, native = twins("mamba2", time_step_limit=[0.05, 0.2], use_conv_bias=False)
    tree = TokenTree.chain(torch.tensor([[5, 6, 7, 8]]))
    scores = [model.score(tree, model.new_cache(1)).logits for model in (plain, native)]
    torch.testing.assert_close(scores[1], scores[0], atol=2e-4, rtol=2e-4)


def test_odd_sizes_and_other_types_are_scanned_in_pytorch() -> None:
    """A head of 8 fills no vector, and float64 has no native scan: both still score."""
    tree = TokenTree.chain(torch.tensor([[5, 6, 7]]))
    for family in ("mamba2", "qwen3_next"):
        for model in (random_recurrent(tiny_raw(family)), random_recurrent(tiny_raw(family), dtype=torch.float64)):
            assert model.score(tree, model.new_cache(1)).logits.isfinite().all()
