"""Recipes beyond text: state-space models that drafters are measured on, and the draft of continuous tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from outrider.images.continuous.model import ContinuousShape, Network, save_network

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "benchmarks")]
import images_continuous  # noqa: E402
import images_continuous_clock  # noqa: E402
import images_continuous_law  # noqa: E402
import images_plot  # noqa: E402
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


def test_the_law_and_the_clock_of_continuous_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At toy scale: a row per rule; a pair of one model is kept wholly and lies at the floor, and so are its passes."""
    shape = ContinuousShape(width=16, num_layers=1, num_heads=1, head_width=16, head_layers=1)
    torch.manual_seed(0)
    network = Network(shape)
    for name in ("target", "draft"):
        save_network(network, tmp_path / name, {})
    few = ["--model", str(tmp_path), "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["law", *few, "--tokens", "300", "--out", str(tmp_path / "law.json")])
    images_continuous_law.main()
    rows = {row["rule"]: row for row in json.loads((tmp_path / "law.json").read_text())["rows"]}
    assert min(rows["reflect"]["kept"], rows["published"]["kept"]) > 0.99 and rows["joint-path"]["kept"] > 0.97
    assert [row["lossless"] for row in rows.values()].count(False) == 3
    assert all(row["ks_max"] < 1.5 * row["limit"] for row in rows.values())
    monkeypatch.setattr(sys, "argv", ["clock", *few, "--rounds", "1", "--batches", "2", "--out", str(tmp_path / "clock.json")])
    images_continuous_clock.main()
    rows = {row["rule"]: row for row in json.loads((tmp_path / "clock.json").read_text())["rows"]}
    assert (rows["plain"]["passes"], rows["reflect"]["passes"]) == (16, 4) and rows["plain"]["ms_an_image"] > 0


def test_a_report_has_the_plot_and_every_row() -> None:
    plain = {"method": "plain", "window": 0, "lossless": True, "codes_per_pass": 1.0, "cnn_fid": 0.5, "tv_mean": 0.0}
    relaxed = {"method": "sjd + lantern (a < b)", "lossless": False, "codes_per_pass": 4.0, "cnn_fid": 2.0, "tv_mean": 0.1}
    rows = [plain, {**plain, **relaxed}]
    made = {"command": "python x", "machine": "m", "date": "d", "commit": "c", "what": "quality"}
    page = images_plot.report([{**made, "rows": rows}])
    assert page.count("<circle") == 4 + 6 and page.count("<tr>") == 3, "two plots, a legend, and a table"
    tokens = [{**row, "method": name, "tokens_per_pass": 2.0, "ks_mean": 0.1} for row, name in zip(rows, ("plain", "reflect"))]
    for row in tokens:
        del row["codes_per_pass"], row["tv_mean"]
    drawn = images_plot.plot(tokens)
    assert drawn.count("<circle") == 4 + 6 and "tokens per pass" in drawn and "KS distance" in drawn and ">reflect<" in drawn
    assert "a &lt; b" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
