"""recipes/stories_draft.py: what a draft for a foreign checkpoint reads, and the folder it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import stories_draft
from bundled_stories import StoriesConfig, read_shape
from bundled_train import Llama, start_draft

from outrider.bundled import bundled_path
from outrider.models.load import load_model


def test_every_document_begins_with_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stories = [np.array(story, dtype=np.int16) for story in ([7, 8, 9], [5, 6], [4, 3, 2, 11])]

    def written(model: Path, out: Path, config: StoriesConfig) -> None:
        assert config.sampler.hottest == 1.0 and config.sampler.context == stories_draft.WINDOW
        out.mkdir()
        np.save(out / "tokens.npy", np.concatenate(stories))
        np.save(out / "offsets.npy", np.cumsum([0] + [len(story) for story in stories]))

    monkeypatch.setattr(stories_draft, "write_stories", written)
    stories_draft.write_corpus(tmp_path, tmp_path, 1.0, batch=1)
    tokens, starts = np.load(tmp_path / "train.npy"), np.load(tmp_path / "train_starts.npy")
    ends = [*starts[1:], len(tokens)]
    assert [tokens[begin:end].tolist() for begin, end in zip(starts, ends, strict=True)] == [
        [stories_draft.START, *story] for story in stories
    ]


def test_the_folder_is_a_draft_of_the_target(tmp_path: Path) -> None:
    """The bundled target in place of the real one: drafts have its vocabulary, its embedding to begin with, its tokenizer."""
    folder = Path(bundled_path("target"))
    shape = read_shape(folder)
    drafts = [start_draft(one, Llama(shape, torch.device("cpu"))) for one in stories_draft.shapes_of(shape)]
    assert [draft.shape.layers for draft in drafts] == [1, 2]
    stories_draft.export(drafts[0], folder, tmp_path / "draft")
    assert json.loads((tmp_path / "draft/config.json").read_text())["num_hidden_layers"] == 1
    assert (tmp_path / "draft/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    model = load_model(str(tmp_path / "draft"))
    assert (model.num_layers, model.vocab_size) == (1, shape.vocab)
