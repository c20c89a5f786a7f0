"""On a GPU a pass never asks cuDNN for attention, which would make a plan for every number of keys."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outrider.models.attention.sdpa import Sight, attend
from outrider.models.attention.without_cudnn import WithoutCudnn


@pytest.fixture(params=[True, False])
def setting(request: pytest.FixtureRequest) -> Any:
    """What the process has chosen for cuDNN."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_attention_on_a_gpu_runs_without_plans(device: str, setting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def called(queries: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return queries

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    with FakeTensorMode():  # no memory, so no GPU is needed
        heads = torch.empty(1, 2, 3, 8, device=device)
        attend(heads, heads, heads, sight=Sight(0, None), scale=1.0)
    assert seen == [setting and device == "cpu"]
    assert torch.backends.cuda.cudnn_sdp_enabled() == setting


def test_the_setting_comes_back_when_the_last_thread_has_left(setting: bool) -> None:
    without, both_inside, first_left = WithoutCudnn(), Barrier(2), Barrier(2)
    seen: list[bool] = []

    def other() -> None:
        with without:
            both_inside.wait(10)
            first_left.wait(10)
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    thread = Thread(target=other)
    thread.start()
    with without:
        both_inside.wait(10)
    first_left.wait(10)
    thread.join(10)
    assert seen == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled() == setting


def test_an_error_inside_gives_the_setting_back(setting: bool) -> None:
    with pytest.raises(ValueError), WithoutCudnn():
        raise ValueError
    assert torch.backends.cuda.cudnn_sdp_enabled() == setting
