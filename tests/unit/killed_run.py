"""What tests of trained heads share: a run that is killed between two saves goes on to exactly the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_train import CORPUS, SMALL, TARGET, Killed

from outrider.models.heads import PackedTexts
from outrider.train.loop import train
from outrider.train.objective import HeadObjective


def assert_goes_on_exactly(objective: Callable[[], HeadObjective], folder: Path) -> None:
    """Trains three equal objectives: one in a single run, one until it is killed, and one that goes on after the kill."""
    whole, killed, resumed = objective(), objective(), objective()
    train([whole], TARGET, CORPUS, folder / "whole", settings=SMALL)
    _kill_at(killed, 6)
    with pytest.raises(Killed):
        train([killed], TARGET, CORPUS, folder / "killed", settings=SMALL)
    train([resumed], TARGET, CORPUS, folder / "killed", settings=SMALL)
    for (name, a), b in zip(whole.head.named_parameters(), resumed.head.parameters(), strict=True):
        assert torch.equal(a, b), name


def _kill_at(objective: HeadObjective, last: int) -> None:
    """The objective dies when it is given a batch for the ``last`` time."""
    inner, calls = objective._noisy, 0

    def dies(batch: PackedTexts) -> PackedTexts:
        nonlocal calls
        calls += 1
        if calls == last:
            raise Killed
        return inner(batch)

    objective._noisy = dies  # type: ignore[method-assign]
