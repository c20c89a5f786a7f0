"""Which files of a folder hold its weights: one, or the shards that an index names."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from outrider.core.errors import ModelError


def open_weights(path: Path) -> safe_open:
    """A safetensors file, memory-mapped."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); fetch the file again") from error


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights; refused if one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise ModelError(f"{index} is not a weight index ({error}); fetch the file again") from error
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(f"{folder / name} is missing though {index.name} names it; fetch the model again")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder} holds only pytorch_model.bin, a pickle, which can run code when opened and is not read; "
            "save it with transformers' save_pretrained, which writes safetensors"
        )
    raise ModelError(f"{folder} holds no model.safetensors; it is not a complete model folder: fetch the model again")
