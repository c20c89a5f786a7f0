"""Programs that measure on a GPU, as far as a machine without one can tell: their families, and their quantised forms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from triton_interpreter import DEVICE

from outrider.models.config import config_of
from outrider.models.families import DEFAULTS
from outrider.models.gpu.known import missing_features

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]
import gpu_families  # noqa: E402
import gpu_quantised  # noqa: E402


def test_every_family_has_a_shape() -> None:
    assert {shape["model_type"] for shape in gpu_families.SHAPES.values()} == set(DEFAULTS)


@pytest.mark.parametrize("name", list(gpu_families.SHAPES))
def test_the_fast_decoder_knows_every_shape(name: str) -> None:
    config = config_of({**gpu_families.SHAPES[name], "num_hidden_layers": 2})
    assert config is not None and not missing_features(config)


@pytest.mark.parametrize("name", ["GGUF Q8_0", "GGUF Q4_K"])
def test_forms_of_gguf_round_to_the_nearest(name: str) -> None:
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = gpu_quantised.FORMS[name](weight)
    assert found.shape == (16, 512)
    assert (found.unpacked(torch.float32) - weight).norm() < (0.01 if name.endswith("Q8_0") else 0.1) * weight.norm()
