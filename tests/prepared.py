"""What a process does before it runs tests: one thread (barriers cost tiny models time), given prices, forked companions.

A process that only starts workers does nothing of it, so that they start at once.
"""

from __future__ import annotations

import os
import random
import subprocess

import numpy as np
import pytest
import torch
from interpreter import can_interpret, interpret_kernels

if can_interpret():
    interpret_kernels()  # before anything of the package is imported

from forked import fork_companions
from given_prices import expect_given

from outrider import api
from outrider.core import request
from outrider.models import companion

torch.set_num_threads(1)
os.environ.setdefault("OUTRIDER_QUIET", "1")  # standard error holds what tests look for, however slow the machine

fork_companions()
if not torch.cuda.is_available():
    api.expect_prices = expect_given


def draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test, alone and in any order; so do its requests without a seed.

    ``torch.manual_seed`` would keep a text of the call stack for every device that is not there, and cost more than a test."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    monkeypatch.setattr(request.secrets, "randbits", random.Random(0).getrandbits)


def start_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have them, not forked."""
    monkeypatch.setattr(companion, "subprocess", subprocess)
