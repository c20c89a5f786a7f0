"""Which models take the GPU's fast decoder, and what is said where it cannot be had. Needs neither a GPU nor triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.bundled import bundled_path
from outrider.core.errors import OptionError
from outrider.models.gpu import can_run, gpu_decoder
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


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, windows=(16, None)),
        replace(CONFIG, head_dim=24),
        replace(CONFIG, activation="gelu"),
        replace(CONFIG, attention_softcap=50.0),
        replace(CONFIG, post_norms=True),
        replace(CONFIG, mlp_bias=True),
    ],
    ids=["window", "head size", "activation", "soft cap", "post norms", "bias"],
)
def test_what_its_kernels_do_not_know_it_leaves_to_the_eager_decoder(config: object) -> None:
    assert not can_run(config, torch.bfloat16, GPU)  # type: ignore[arg-type]


def test_other_types_and_devices_leave_it() -> None:
    assert not can_run(CONFIG, torch.float32, GPU)
    assert not can_run(CONFIG, torch.bfloat16, torch.device("cpu"))
    assert gpu_decoder(CONFIG, tiny_weights(CONFIG)) is None


def test_numerics_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(OptionError, match="invariant"):
        load_model(bundled_path("draft"), device="cpu", numerics="invariant")
    with pytest.raises(OptionError, match="did you mean"):
        load_model(bundled_path("draft"), device="cpu", numerics="invarant")


def test_few_bits_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(OptionError, match=r"int4.*'int8' is there"):
        load_model(bundled_path("draft"), device="cpu", dtype="int4")


def test_tiles_are_cut_to_the_shared_memory_there_is() -> None:
    assert stages_that_fit(4, 20_000, limit=232_448) == 4
    assert stages_that_fit(4, 36_864, limit=101_376) == 2
    assert stages_that_fit(3, 32_768, other_bytes=16_384, limit=101_376) == 2
    assert stages_that_fit(4, 200_000, limit=101_376) == 1  # the compiler will say so if even that is too much
    assert shared_memory() > 40_000
