"""The output of ``outrider info`` for a vision-language model, whose language model runs on the lean decoder on every
device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.models.info import ModelInfo
from outrider.vision.load import can_see

_OWN = "that of a text model with the sizes above"


def with_vision(info: ModelInfo, path: Path) -> ModelInfo:
    """The description of a checkpoint, corrected if it is a vision-language model of a known family."""
    if not can_see(path):
        return info
    runs_on = "lean decoder; images through transformers' vision tower (docs/vision.md)"
    return replace(info, runs_on=runs_on, gpu_path=_OWN, cpu_path=_OWN, same_bits=f"{_OWN}; the tower's own passes are not")
