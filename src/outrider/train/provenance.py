"""The origin of a checkpoint: target, data, settings, software and machine. It is saved with it as ``provenance.json``."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.core.interfaces import Target


def training_notes(target_name: str, target: Target, files: Sequence[Path], **more: Any) -> dict[str, Any]:
    """The facts that reproduce the run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["outrider", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else platform.machine(),
        "target": {"name": Path(target_name).name, "layers": target.num_layers, "vocab_size": target.vocab_size},
        "data": [{"file": file.name, "bytes": file.stat().st_size, "sha256": _digest(file)} for file in files],
        **more,
    }


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()[:16]
