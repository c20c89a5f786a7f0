"""The recipes that measure newer drafters: what they lay before the models, and how figures are put together."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "benchmarks")]
import confidence  # noqa: E402
import field  # noqa: E402
import gpu_parts  # noqa: E402
import long_context  # noqa: E402

PIECES = np.arange(40 * 8).reshape(40, 8)


def test_a_document_repeats_pieces_that_stand_before() -> None:
    text = long_context.document(PIECES, 30 * 8, np.random.default_rng(0)).reshape(-1, 8)
    assert all(row[0] % 8 == 0 and (np.diff(row) == 1).all() for row in text), "pieces stay whole"
    again = [place for place, row in enumerate(text) if row[0] in text[:place, 0]]
    assert len(again) > 8 and min(again) > 1


def test_a_context_ends_with_the_beginning_of_an_earlier_piece_or_of_a_new_one() -> None:
    found = long_context.contexts(PIECES, 100, 5)
    for kind, pairs in found.items():
        for begun, rest in pairs:
            assert len(begun) == 100 and (np.diff([*begun[-2:], *rest]) == 1).all()
            before = begun[:-2].tolist()
            assert kind != "copy" or begun[-2] in before[: 3 * len(before) // 4 + 8]


def test_learning_and_judging_see_different_windows(tmp_path: Path) -> None:
    np.save(tmp_path / "own.npy", np.arange(16 * 8).reshape(16, 8))
    learned, judged = (long_context.cut(tmp_path / "own.npy", 4, held_out=held) for held in (False, True))
    assert len(learned) == 28 and len(judged) == 4 and not set(learned.flat) & set(judged.flat)


def test_every_group_is_trained_for_the_same_steps() -> None:
    made = field.commands(Path("out"), steps=7, seconds=3.0, smoke=False)
    heads = [" ".join(parts[0]) for name, parts in made.items() if name in field.GROUPS]
    assert len(heads) == 3 and all("--steps 7 --train-seconds 3.0" in line and "--batch 32" in line for line in heads)
    assert sum(len(kinds) for kinds in field.GROUPS.values()) == len(
        {kind for kinds in field.GROUPS.values() for kind in kinds}
    )


def test_parts_of_a_tree_are_the_dense_attention() -> None:
    calls = gpu_parts.ways(2, 7, 33, torch.device("cpu"))
    torch.testing.assert_close(calls["parts"](), calls["dense"](), atol=1e-5, rtol=1e-4)


def test_calibration_by_hand() -> None:
    sure, chance = torch.tensor([0.05, 0.05, 0.95]), torch.tensor([0.0, 0.2, 0.75])
    assert confidence.reliability(sure, chance) == [[2, 0.05, 0.1], [1, 0.95, 0.75]]
    assert abs(confidence.calibration_error(sure, chance) - (0.1 + 0.2) / 3) < 1e-6
