"""The program that says how far weights of few bits move a model's laws."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]
from few_bits import compared  # noqa: E402  # pyright: ignore


def test_distances_are_those_of_the_definition() -> None:
    exact, rounded = (
        torch.tensor([[0.5, 0.5], [0.9, 0.1]]).double().log(),
        torch.tensor([[0.25, 0.75], [0.9, 0.1]]).double().log(),
    )
    found = compared("two", exact, rounded, torch.tensor([0, 0]))
    assert found["KL, mean"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert found["total variation"] == pytest.approx(0.25 / 2)
    assert found["same likeliest token"] == 0.5
    assert found["perplexity"] == pytest.approx(math.exp(-(math.log(0.25) + math.log(0.9)) / 2))
