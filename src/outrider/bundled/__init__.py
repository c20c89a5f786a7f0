"""The small models that make the first command work with no download: a target, its draft, its heads, and a
pair that draws digits (see README.md here)."""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import ModelError, nearest

_MODELS = ("target", "draft", "heads/medusa", "heads/hydra", "heads/eagle1", "heads/eagle3", "digits/target", "digits/draft")


def has_bundled(name: str) -> bool:
    return name in _MODELS


def bundled_path(name: str) -> str:
    """Folder of a bundled model."""
    if name not in _MODELS:
        raise ModelError(f"unknown bundled model {name!r}; {nearest(name, _MODELS)}")
    folder = Path(__file__).parent / name
    if not (folder / "config.json").exists():
        raise ModelError(f"the bundled model {name!r} is missing from {folder}; install the package again")
    return str(folder)
