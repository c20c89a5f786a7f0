"""Checkpoints of the sizes people run on a CPU that say what the bundled pair says: the models of benchmarks/cpu.py.

The bundled target and its draft are inflated (recipes/inflate.py) to a *small* model of 34M parameters, 512 wide, and a *mid*
one of 196M, 1024 wide, each with a draft of two layers, and written as Hugging Face folders in bfloat16, so that every engine
reads the same weights. Cost is that of the size, acceptance that of the trained pair.

    python benchmarks/cpu_models.py [--out build/cpu]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.bundled import bundled_path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from inflate import Inflated, InflatedShape, inflated_raw_config  # pyright: ignore[reportMissingImports]

_CONTEXT = 2048
SHAPES = {
    "small": InflatedShape(hidden=512, layers=16, heads=8, kv_heads=4, head_dim=64, mlp=704, vocab=4096, context=_CONTEXT),
    "small-draft": InflatedShape(
        hidden=320, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=1024, vocab=4096, context=_CONTEXT
    ),
    "mid": InflatedShape(hidden=1024, layers=16, heads=16, kv_heads=8, head_dim=64, mlp=2816, vocab=4096, context=_CONTEXT),
    "mid-draft": InflatedShape(hidden=512, layers=2, heads=8, kv_heads=4, head_dim=64, mlp=1408, vocab=4096, context=_CONTEXT),
}


def make_models(out: Path) -> dict[str, Path]:
    """The folders, written where they are missing."""
    folders = {name: out / name for name in SHAPES}
    for name, folder in folders.items():
        if not (folder / "config.json").is_file():
            _write(bundled_path("draft" if name.endswith("draft") else "target"), SHAPES[name], folder)
    return folders


def _write(source: str, shape: InflatedShape, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = Inflated(source, shape, dtype=torch.bfloat16, device=torch.device("cpu"))
    save_file({name: tensors.read(name) for name in sorted(tensors.names)}, folder / "model.safetensors", {"format": "pt"})
    for path in Path(source).iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder / path.name)
    raw = {**inflated_raw_config(source, shape), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/cpu"))
    for name, folder in make_models(parser.parse_args().out).items():
        print(f"{name}: {folder}")
