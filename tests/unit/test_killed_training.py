"""All that can be trained goes on exactly after a kill: a table of kinds, and a run of each that has no test of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killed_run import assert_goes_on_exactly
from test_early_exit_training import ends, fresh
from test_joint import learner
from test_train import TARGET, objective
from tiny_pair import _RAW

from outrider.models.adapter import new_adapter
from outrider.models.heads import HEAD_KINDS
from outrider.train.acceptance import AcceptanceObjective, AcceptanceSettings
from outrider.train.distill import DistillObjective, DistillSettings
from outrider.train.kinds import OTHER_KINDS
from outrider.train.layerskip import LayerSkipObjective, LayerSkipSettings
from outrider.train.objective import Objective
from outrider.train.objective_joint import JointObjective, JointSettings

ELSEWHERE = {
    "test_train": ("medusa", "eagle3"),
    "test_fspad": ("fspad",),
    "test_falcon": ("falcon",),
    "test_chimera": ("chimera",),
    "test_dspark": ("dspark",),
    "test_longspec": ("longspec",),
    "test_visual_heads": ("msd", "vispec", "specvlm"),
    "test_s2d": ("sorted",),
    "test_early_exit_training": ("specee",),
}
"""Kinds by the file whose own test kills their training."""
HEADS = ("hydra", "eagle1", "mlp-speculator", "redrafter", "mtp", "mtp-parallel", "l-mtp", "p-eagle", "dflash")


ENDS = ends()
"""Solved for once: the solver's last bits differ from call to call."""


def kangaroo(folder: Path) -> Objective:
    del folder
    torch.manual_seed(0)
    return DistillObjective("kangaroo", new_adapter(_RAW, ENDS, TARGET, exit_layer=1), TARGET, DistillSettings("mixed"))


def joint(folder: Path) -> Objective:
    model = learner(folder)
    return JointObjective(model, model.frozen(), JointSettings(num_heads=2, head_warmup=2, lora_rank=2))


OTHERS: dict[str, Callable[[Path], Objective]] = {
    "distill": lambda _: DistillObjective("distill", fresh(), TARGET, DistillSettings()),
    "adaspec": lambda _: DistillObjective("adaspec", fresh(), TARGET, DistillSettings(), reference=fresh(2)),
    "pretrain": lambda _: DistillObjective("pretrain", fresh(), TARGET, DistillSettings()),
    "kangaroo": kangaroo,
    "layerskip": lambda _: LayerSkipObjective(fresh(3), TARGET, LayerSkipSettings(rotation=1, scale=1.0, judged_exit=1)),
    "medusa2": joint,
    "acceptance-head": lambda _: AcceptanceObjective(fresh(), TARGET, AcceptanceSettings(temperature=1.0, width=16)),
}


def test_every_kind_has_a_killed_run() -> None:
    covered = {*HEADS, *OTHERS, *(kind for kinds in ELSEWHERE.values() for kind in kinds)}
    assert covered == {*HEAD_KINDS, *OTHER_KINDS}
    for file in ELSEWHERE:
        assert "goes_on_exactly" in (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8"), file


@pytest.mark.parametrize("kind", HEADS)
def test_a_killed_run_of_heads_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    assert_goes_on_exactly(lambda: objective(kind, noise=0.1), tmp_path)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_killed_run_of_others_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    assert_goes_on_exactly(lambda: OTHERS[kind](tmp_path), tmp_path)
