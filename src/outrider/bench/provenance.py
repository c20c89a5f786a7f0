"""Where figures come from: written beside every result, so that it can be made again or doubted with reason."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.core.interfaces import Target
from outrider.models.load import local_path


def provenance(command: list[str] | None = None) -> dict[str, Any]:
    """The machine, the software and the moment."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command if command is not None else ["outrider", *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
    }


def describe_target(name: str, target: Target) -> dict[str, Any]:
    """Which weights, and how they ran."""
    path = local_path(name)
    return {
        "name": path.name if path.is_absolute() else name,
        "digest": _digest(path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "decoder": type(target).__name__,
        "layers": target.num_layers,
        "vocabulary": target.vocab_size,
        "context": target.max_len,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "")
    return name + "".join(f", {flag}" for flag in ("avx512f", "amx_bf16") if f" {flag}" in flags)


def _digest(path: Path) -> str:
    """Of the first and last megabyte and the size of every weight file: tells checkpoints apart without reading them whole."""
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def _commit() -> str | None:
    """The source's commit, with a mark if files differ from it; None outside a repository."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
