"""States kept on disk: the same training, one target pass per text, and nothing wrong after a kill or with another target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train import CORPUS, SMALL, TARGET, objective
from tiny_pair import tiny_model

from outrider.core.errors import OptionError
from outrider.train.features import compute
from outrider.train.loop import train
from outrider.train.stored import FeatureStore


def test_training_from_stored_states_is_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, stored = objective("eagle3"), objective("eagle3")
    train([plain], TARGET, CORPUS, tmp_path / "plain", settings=SMALL)
    seen = [0]

    def counted(target, documents, taps):
        seen[0] += len(documents)
        return compute(target, documents, taps)

    monkeypatch.setattr("outrider.train.stored.compute", counted)
    settings = replace(SMALL, store=str(tmp_path / "states"), max_steps=12)
    train([objective("eagle3")], TARGET, CORPUS, tmp_path / "more", settings=settings)
    texts = {document.tokens for document in (*CORPUS.train, *CORPUS.held_out)}
    assert seen[0] <= len(texts) + 1  # one to see how wide states are
    train([stored], TARGET, CORPUS, tmp_path / "stored", settings=replace(SMALL, store=str(tmp_path / "states")))
    assert seen[0] <= len(texts) + 2
    for a, b in zip(plain.head.parameters(), stored.head.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_kill_loses_the_last_text_at_most(tmp_path: Path) -> None:
    documents = list(CORPUS.train[:5])
    expected = compute(TARGET, documents, (1,))
    FeatureStore(tmp_path, TARGET, (1,)).states(documents[:3])
    index, states = tmp_path / "index.jsonl", tmp_path / "states.bin"
    index.write_text(index.read_text()[:-9])  # in the middle of a line
    with states.open("ab") as file:
        file.write(b"half a text")
    found = FeatureStore(tmp_path, TARGET, (1,)).states(documents)
    for tap in (1, 2):
        for mine, theirs in zip(found[tap], expected[tap], strict=True):
            torch.testing.assert_close(mine, theirs)  # three texts at a time and five may round differently


def test_states_of_other_targets_and_layers_are_refused(tmp_path: Path) -> None:
    FeatureStore(tmp_path, TARGET, (1,))
    with pytest.raises(OptionError, match="another target or of other layers"):
        FeatureStore(tmp_path, TARGET, (0,))
    with pytest.raises(OptionError, match="another target"):
        FeatureStore(tmp_path, tiny_model(3.0), (1,))
