"""Which models take the GPU's fast decoder, and what is said where it cannot be had. Needs neither a GPU nor triton."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.models.families import DEFAULTS
from outrider.models.features import ModelConfig
from outrider.models.gpu import _why_triton_fails, can_run, gpu_decoder
from outrider.models.gpu.known import missing_features
from outrider.models.gpu.limits import shared_memory, stages_that_fit
from outrider.models.load import load_model
from outrider.models.random_decoder import tiny_config, tiny_weights

GPU = torch.device("cuda")
CONFIG = tiny_config(head_dim=16)


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def test_a_llama_in_16_bits_on_a_gpu_takes_it() -> None:
    assert can_run(CONFIG, torch.bfloat16, GPU) and can_run(CONFIG, torch.float16, GPU)
    assert can_run(tiny_config("qwen3", head_dim=16), torch.bfloat16, GPU)


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_every_family_takes_it(family: str) -> None:
    experts = {"num_experts_per_tok": 2} if family == "deepseek_v2" else {}  # which its own config leaves out
    assert can_run(tiny_config(family, head_dim=64, hidden_size=256, **experts), torch.bfloat16, GPU)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(CONFIG, windows=(16, None)), "window of 16"),
        (replace(CONFIG, head_dim=512), "more than 256"),
        (replace(CONFIG, head_dim=24, qk_norm=True), "heads of 24"),
    ],
    ids=["window", "head size", "norms of odd heads"],
)
def test_what_its_kernels_do_not_know_it_leaves_to_the_eager_decoder(config: ModelConfig, reason: str) -> None:
    assert not can_run(config, torch.bfloat16, GPU)
    assert reason in missing_features(config)[0]


def test_other_types_and_devices_leave_it() -> None:
    assert not can_run(CONFIG, torch.float32, GPU)
    assert not can_run(CONFIG, torch.bfloat16, torch.device("cpu"))
    assert gpu_decoder(CONFIG, tiny_weights(CONFIG)) is None


def test_without_a_c_compiler_the_gpu_runs_in_pytorch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("Failed to find C compiler.")

    active = SimpleNamespace(get_current_device=fails)
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=SimpleNamespace(active=active)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("outrider.models.gpu._why_triton_fails", functools.cache(_why_triton_fails.__wrapped__))
    with pytest.warns(UserWarning, match="Failed to find C compiler.*Install gcc"):
        assert not can_run(CONFIG, torch.bfloat16, GPU)
    assert not can_run(CONFIG, torch.float16, GPU)  # it is said once
    active.get_current_device = lambda: 0
    monkeypatch.setattr("outrider.models.gpu._why_triton_fails", functools.cache(_why_triton_fails.__wrapped__))
    assert can_run(CONFIG, torch.bfloat16, GPU)


def test_numerics_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(OptionError, match="invariant"):
        load_model(bundled_path("draft"), device="cpu", fast=False, numerics="invariant")
    if load_model(bundled_path("draft"), device="cpu").traits.is_invariant:  # the native pass, where it can be built
        assert load_model(bundled_path("draft"), device="cpu", numerics="invariant").traits.is_invariant
    with pytest.raises(OptionError, match="did you mean"):
        load_model(bundled_path("draft"), device="cpu", numerics="invarant")


def test_few_bits_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(OptionError, match=r"int4.*dtype = 'int8' does not"):
        load_model(bundled_path("draft"), device="cpu", dtype="int4", fast=False)


def test_tiles_are_cut_to_the_shared_memory_there_is() -> None:
    assert stages_that_fit(4, 20_000, limit=232_448) == 4
    assert stages_that_fit(4, 36_864, limit=101_376) == 2
    assert stages_that_fit(3, 32_768, other_bytes=16_384, limit=101_376) == 2
    assert stages_that_fit(4, 200_000, limit=101_376) == 1  # the compiler will say so if even that is too much
    assert shared_memory() > 40_000
