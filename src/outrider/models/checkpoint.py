"""Folders of weights, written completely or not at all: a full disk or a killed process leaves the old checkpoint.

Every file is first written under a temporary name and then renamed, the tensors before the files that describe them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from outrider.core.errors import ModelError


def write_checkpoint(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    config: Mapping[str, Any],
    notes: Mapping[str, Any] | None = None,
    beside: Iterable[Path] = (),
) -> None:
    """Write ``model.safetensors``, ``config.json``, ``provenance.json`` with the notes, and copies of the other files
    ``beside``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        for name, content in (("config.json", config), ("provenance.json", notes)):
            if content is not None:
                text = json.dumps(content, indent=2) + "\n"
                replace_file(folder / name, lambda path, text=text: path.write_text(text))
        for file in beside:
            if file.name not in ("config.json", "provenance.json"):
                replace_file(folder / file.name, partial(shutil.copyfile, file))
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{folder} cannot be written ({error}); the last checkpoint is complete: free disk space, then resume"
        ) from error


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file, then move it into place."""
    beside = path.with_name(path.name + ".new")
    try:
        write(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
