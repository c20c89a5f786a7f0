"""Shared by all tests: one thread (tiny models lose time to thread barriers), no chance, and where optional data lies."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import can_interpret, interpret_kernels
from tiers import choose_tier

if can_interpret():
    interpret_kernels()  # before anything of the package is imported

from outrider.core import request
from outrider.models.native import BUILD

torch.set_num_threads(1)
os.environ.setdefault("OUTRIDER_QUIET", "1")  # standard error holds what tests look for, however slow the machine

BUILD.wait()  # once per machine: tests read the command line's standard error, where a first build says that it is building


def pytest_configure(config: pytest.Config) -> None:
    choose_tier(config.option.markexpr)


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test draws the same numbers each time, alone and in any order; so do its requests without a seed."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    monkeypatch.setattr(request.secrets, "randbits", random.Random(0).getrandbits)


SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def stories15m() -> Path:
    """A real pretrained checkpoint, when the data folder is there."""
    folder = SHARED / "models" / "stories15M"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder
