"""Shared by all tests: one thread (barriers cost tiny models time), no chance, given prices, and where optional data lies."""

from __future__ import annotations

import gc
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import can_interpret, interpret_kernels
from tiers import choose_tier

if can_interpret():
    interpret_kernels()  # before anything of the package is imported

from forked import fork_companions
from given_prices import expect_given
from native_build import begin_build, wait_for_build

from outrider import api
from outrider.core import request
from outrider.models import companion

torch.set_num_threads(1)
os.environ.setdefault("OUTRIDER_QUIET", "1")  # standard error holds what tests look for, however slow the machine

fork_companions()
if not torch.cuda.is_available():
    api.expect_prices = expect_given


def pytest_configure(config: pytest.Config) -> None:
    choose_tier(config.option.markexpr)
    if getattr(config.option, "tx", None) and not hasattr(config, "workerinput"):
        begin_build()  # workers will be started


def pytest_collection_finish(session: pytest.Session) -> None:
    """The native pass is there before the first test: tests read standard error, where a first build says that it is building.
    Modules and tests stay until the end, so no collection of garbage needs to look at them."""
    if not session.config.option.collectonly:
        wait_for_build()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test draws the same numbers each time, alone and in any order; so do its requests without a seed.

    ``torch.manual_seed`` would keep a text of the call stack for every device that is not there, and cost more than a test."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    monkeypatch.setattr(request.secrets, "randbits", random.Random(0).getrandbits)


@pytest.fixture
def started_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Companion processes are started as users have them, not forked."""
    monkeypatch.setattr(companion, "subprocess", subprocess)


SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def stories15m() -> Path:
    """A real pretrained checkpoint, when the data folder is there."""
    folder = SHARED / "models" / "stories15M"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder
