"""The grid-caption recipe: scenes, captions and labels agree, and a short run trains, saves and measures."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import grid_captions as grid
import grid_drafters


def test_a_caption_names_every_cell() -> None:
    scene = [("red", "dot"), None, None, None, ("blue", "bar"), None, None, None, None]
    assert grid.caption_of(scene, 0) == (
        "row 1 : red dot , blank , blank ; row 2 : blank , blue bar , blank ; row 3 : blank , blank , blank . "
        "there are 2 things . </s>"
    )
    assert grid.caption_of(scene, 1).startswith("first line : red dot , nothing , nothing ; second line :")
    pixels = grid.picture_of(scene)
    assert pixels.shape == (3, 24, 24) and pixels[:, :8, 8:].abs().sum() == 0
    assert torch.equal(pixels[:, 3, 4], torch.tensor([1.0, -1.0, -1.0])) and pixels[2, 11, 10] == 1


def test_labels_are_the_answers_alone() -> None:
    pixels, tokens, labels = grid.batch_of(random.Random(3), 16, 4)
    num_images = (tokens == grid.IDS["<image>"]).sum(1) // grid.NUM_PLACES
    assert len(pixels) == num_images.sum() and tokens.shape == labels.shape
    assert {0, 1, 4} <= set(num_images.tolist()) <= {0, 1, 2, 4}
    kept = labels != -100
    assert torch.equal(labels[kept], tokens[kept]) and not (labels == grid.IDS["<pad>"]).any()
    assert [grid.WORDS[row[keep][-1]] for row, keep in zip(labels, kept, strict=True)] == ["</s>"] * 16


def test_one_picture_shows_the_scene_and_the_others_are_blank() -> None:
    sample = grid.sample_of(random.Random(1), 4, "count")
    assert sample.prompt == "<s> <image> <image> <image> <image> count :" and sum(sample.pictures) == 1
    assert [bool(image.any()) for image in sample.images] == list(sample.pictures)
    assert sum(int(word) for word in sample.answer.split() if word.isdigit()) == 4
    assert grid.is_right(grid.ids_of(sample.answer), sample) and not grid.is_right([1], sample)


def test_a_short_run_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--out", str(tmp_path), "--steps", "3", "--batch", "2", "--scenes", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["grid_captions.py", *flags])
    grid.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["scenes"] == 2 and all(found[name]["tokens_per_pass"] >= 1 for name in grid.METHODS)


@pytest.mark.exhaustive
def test_drafters_are_trained_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--out", str(tmp_path), "--steps", "2", "--batch", "2", "--device", "cpu", "--parts", "target"]
    monkeypatch.setattr(sys, "argv", ["grid_captions.py", *flags])
    grid.main()
    flags = ["--grid", str(tmp_path), "--out", str(tmp_path / "heads"), "--steps", "2", "--batch", "2", "--texts", "6"]
    kinds = ["msd", "vispec", "specvlm"]
    flags += ["--scenes", "2", "--device", "cpu", "--only", *kinds, "--results", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["grid_drafters.py", *flags])
    grid_drafters.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "found.json").read_text()) and len(found["rows"]) == 5
    for row in found["rows"]:
        assert all(row[name]["identical"] == 1 and row[name]["tokens_per_pass"] >= 1 for name in kinds)
    assert all(abs(sum(shares.values()) - 1) < 1e-6 for shares in found["experts"].values())
