"""What tests of training share: a run that is killed between two saves goes on to exactly the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from test_train import CORPUS, SMALL, TARGET, Killed

from outrider.train.data import Corpus, Document
from outrider.train.loop import train
from outrider.train.objective import Objective


def assert_goes_on_exactly(objective: Callable[[], Objective], folder: Path, *, corpus: Corpus = CORPUS) -> None:
    """Trains three equal objectives: one in a single run, one until it is killed, and one that goes on after the kill."""
    whole, killed, resumed = objective(), objective(), objective()
    train([whole], TARGET, corpus, folder / "whole", settings=SMALL)
    _kill_at(killed, SMALL.max_steps - 1)
    with pytest.raises(Killed):
        train([killed], TARGET, corpus, folder / "killed", settings=SMALL)
    train([resumed], TARGET, corpus, folder / "killed", settings=SMALL)
    expected, found = whole.module.state_dict(), resumed.module.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def _kill_at(objective: Objective, last: int) -> None:
    """The objective dies when it is given the documents of step ``last``."""
    inner = objective.write

    def dies(documents: Sequence[Document], step: int) -> Sequence[Document]:
        if step == last:
            raise Killed
        return inner(documents, step)

    objective.write = dies  # type: ignore[method-assign]
