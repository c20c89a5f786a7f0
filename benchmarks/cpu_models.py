"""Checkpoints of the sizes people run on a CPU that say what the bundled pair says: the models of benchmarks/cpu.py.

The bundled target and its draft are inflated (recipes/inflate.py) to a *small* model of 34M parameters, 512 wide, and a *mid*
one of 196M, 1024 wide. Each has a draft of two layers. All are written as Hugging Face folders in bfloat16, so that every
engine reads the same weights. Cost is that of the size, acceptance that of the trained pair. Model *gptq* is the bundled target
as a GPTQ folder of 4 bits. Each weight is rounded to the nearest code, with a scale of 16 bits and a zero for every 64 inputs.

    python benchmarks/cpu_models.py [--out build/cpu]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.bundled import bundled_path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from inflate import Inflated, InflatedShape, inflated_raw_config  # pyright: ignore[reportMissingImports]

_CONTEXT = 2048
_BITS, _GROUP = 4, 64
SHAPES = {
    "small": InflatedShape(hidden=512, layers=16, heads=8, kv_heads=4, head_dim=64, mlp=704, vocab=4096, context=_CONTEXT),
    "small-draft": InflatedShape(
        hidden=320, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=1024, vocab=4096, context=_CONTEXT
    ),
    "mid": InflatedShape(hidden=1024, layers=16, heads=16, kv_heads=8, head_dim=64, mlp=2816, vocab=4096, context=_CONTEXT),
    "mid-draft": InflatedShape(hidden=512, layers=2, heads=8, kv_heads=4, head_dim=64, mlp=1408, vocab=4096, context=_CONTEXT),
}


def make_models(out: Path, names: Iterable[str] = (*SHAPES, "gptq")) -> dict[str, Path]:
    """The folders, written where they are missing."""
    folders = {name: out / name for name in names}
    for name, folder in folders.items():
        if (folder / "config.json").is_file():
            continue
        if name == "gptq":
            _write_gptq(Path(bundled_path("target")), folder)
        else:
            _write(bundled_path("draft" if name.endswith("draft") else "target"), SHAPES[name], folder)
    return folders


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes along the last dimension in words of 32 bits."""
    apart = codes.to(torch.int64).unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    whole = apart.sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def _gptq(stem: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a matrix [out, in], to the nearest code."""
    most, groups = (1 << _BITS) - 1, weight.float().unflatten(1, (-1, _GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(1, most)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most).flatten(1)
    return {
        f"{stem}.qweight": _words(codes, _BITS).T.contiguous(),
        f"{stem}.qzeros": _words(zeros.T - 1, _BITS).contiguous(),
        f"{stem}.scales": scales.T.contiguous(),
        f"{stem}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP,
    }


def _write_gptq(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_matrix = name.endswith("proj.weight")
        stored |= _gptq(name.removesuffix(".weight"), tensor) if is_matrix else {name: tensor.half()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("token*"):
        shutil.copyfile(path, folder / path.name)
    settings = {"quant_method": "gptq", "bits": _BITS, "group_size": _GROUP, "desc_act": False, "sym": False}
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))


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
