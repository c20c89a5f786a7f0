"""Recipes beyond text: state-space models that drafters are measured on, and the draft of continuous tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from outrider.images.continuous.model import ContinuousShape, Network

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "benchmarks")]
import images_continuous  # noqa: E402
import state_space  # noqa: E402
import state_space_drafts  # noqa: E402


def test_state_space_models_are_made_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    sizes = ["--width", "64", "--layers", "1", "--draft-width", "64", "--batch", "2", "--steps", "1", "--most-bytes", "4096"]
    monkeypatch.setattr(sys, "argv", ["state_space.py", "--out", str(tmp_path / "made"), "--device", "cpu", *sizes])
    state_space.main()
    found = tmp_path / "rows.json"
    few = ["--prompts", "2", "--prompt-len", "4", "--tokens", "3", "--device", "cpu", "--out", str(found)]
    monkeypatch.setattr(sys, "argv", ["state_space_drafts.py", "--models", str(tmp_path / "made"), *few])
    state_space_drafts.main()
    rows = json.loads(found.read_text())["rows"]
    assert {(row["method"], row["temperature"]) for row in rows} >= {("draft-model", "0"), ("best-first", "1")}
    assert all(row["identical"] == row["prompts"] == 2 and row["tokens_per_pass"] >= 1 for row in rows)


def test_held_out_modules_are_not_learned() -> None:
    learned, held_out = state_space.rows_of_library(1 << 16)
    assert learned.shape[1] == held_out.shape[1] == state_space.ROW_LEN
    assert not {row.tobytes() for row in learned} & {row.tobytes() for row in held_out}


def test_the_divergence_of_paths_is_zero_for_the_target_itself() -> None:
    torch.manual_seed(0)
    target, draft = (Network(ContinuousShape(width=32, num_layers=1, num_heads=1, head_width=32)) for _ in range(2))
    tokens, labels = torch.rand(2, 16, 4) * 2 - 1, torch.tensor([3, 7])
    losses = [
        images_continuous.path_loss(one, target)(tokens, labels, torch.Generator().manual_seed(1)) for one in (target, draft)
    ]
    assert losses[0] == 0 and losses[1] > 0
