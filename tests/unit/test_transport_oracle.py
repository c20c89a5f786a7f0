"""benchmarks/transport_oracle.py in a small size: the optimum bounds every rule, and transport reaches it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import transport_oracle  # type: ignore[import-not-found]


def test_every_rule_stays_below_the_optimum_and_transport_reaches_it() -> None:
    found = transport_oracle.main(["--vocab", "3", "--guesses", "2", "--pairs", "4"])["2"]
    for name, values in found.items():
        assert all(value <= best + 1e-9 for value, best in zip(values, found["optimum"], strict=True)), name
    assert found["transport"] == pytest.approx(found["optimum"], abs=1e-9)
    assert sum(found["naive"]) < sum(found["recursive"]) < sum(found["transport"])


def test_the_optimum_by_hand() -> None:
    """Disjoint laws share nothing; equal ones everything; one sure guess is worth its own probability."""
    p, q = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.0, 0.0, 1.0]).double()
    assert transport_oracle.optimum(p, q, 2) == pytest.approx(0)
    assert transport_oracle.optimum(p, p, 2) == pytest.approx(1)
    assert transport_oracle.optimum(torch.tensor([0.3, 0.3, 0.4]).double(), q, 3) == pytest.approx(0.4)
