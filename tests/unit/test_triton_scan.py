"""The kernels of Mamba-2 and gated delta layers against PyTorch's scans: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrence import check_twins
from triton_interpreter import DEVICE

from outrider.core.tree import TokenTree
from outrider.models.recurrent import delta_mixer, mamba_mixer
from outrider.models.recurrent.decoder import RecurrentDecoder
from outrider.models.recurrent.delta_triton import TritonDelta
from outrider.models.recurrent.mamba_triton import TritonMamba
from outrider.models.recurrent.random_model import random_recurrent, tiny_raw

SIZES = {
    "mamba2": {"num_heads": 2, "head_dim": 24, "state_size": 16, "n_groups": 2, "num_hidden_layers": 1},
    "bamba": {"mamba_n_heads": 2, "mamba_d_state": 40, "mamba_n_groups": 1, "mamba_d_head": 32, "num_hidden_layers": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_state": 24, "mamba_n_groups": 1, "num_hidden_layers": 1},
    "qwen3_next": {"linear_key_head_dim": 24, "linear_value_head_dim": 40, "linear_num_value_heads": 4},
}


def twins(monkeypatch: pytest.MonkeyPatch, family: str, **changes: Any) -> tuple[RecurrentDecoder, RecurrentDecoder]:
    raw = tiny_raw(family, **{**SIZES[family], **changes})
    plain = random_recurrent(raw, fast=False, device=DEVICE)
    monkeypatch.setattr(mamba_mixer, "mamba_scan", lambda shape, numbers, fast: TritonMamba(shape, numbers))
    monkeypatch.setattr(delta_mixer, "delta_scan", lambda shape, numbers, fast: TritonDelta(shape, numbers))
    return plain, random_recurrent(raw, device=DEVICE)


@pytest.mark.parametrize("family", list(SIZES))
def test_rounds_of_trees_score_as_the_oracle_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_twins(*twins(monkeypatch, family), num_rounds=14 if DEVICE.type == "cuda" else 2)


def test_bounds_of_time_steps_and_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = twins(monkeypatch, "mamba2", time_step_limit=[0.05, 0.2], use_conv_bias=False)
    tree = TokenTree.chain(torch.tensor([[5, 6, 7, 8]], device=DEVICE))
    scores = [model.score(tree, model.new_cache(1)).logits for model in (plain, fast)]
    torch.testing.assert_close(scores[1], scores[0], atol=2e-4, rtol=2e-4)
