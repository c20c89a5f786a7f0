"""The origin of figures. It is written beside every result, so that the result can be repeated and judged."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.bundled import bundled_path
from outrider.core.interfaces import Target
from outrider.core.version import VERSION
from outrider.models.source import local_path


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


def results_head(what: str, *, script: str | None = None) -> dict[str, Any]:
    """The part of a file in ``benchmarks/results`` beside its rows: how, when, where and at which commit they were made.
    ``script`` is the path of the program in the repository; without it the command is one of ``outrider``."""
    made = provenance(None if script is None else ["python", script, *sys.argv[1:]])
    place = made["gpu"] or made["cpu"]
    machine = f"{place}, {made['cores']} cores, torch {made['torch']}, load {made['load']}"
    return {"command": made["command"], "machine": machine, "date": made["date"][:10], "commit": made["commit"], "what": what}


def keep_results(path: Path | None, what: str, rows: list[dict[str, Any]], *, script: str, **more: Any) -> dict[str, Any]:
    """Make the document of a file in ``benchmarks/results``, with the entries of ``more``, and write it if a path is given."""
    document = {**results_head(what, script=script), **more, "rows": rows}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)  # a missing folder must not cost a run of half an hour
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def describe_target(name: str, target: Target) -> dict[str, Any]:
    """The weights of a target, and how they ran."""
    path = local_path(name)
    return {
        "name": model_name(name),
        "digest": _digest(path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "decoder": type(target).__name__,
        "layers": target.num_layers,
        "vocabulary": target.vocab_size,
        "context": target.max_len,
    }


def model_name(name: str) -> str:
    """The name by which a reader knows a model: its hub name, the name of its folder or file, or that it came with the
    package."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    bundled = Path(bundled_path("target")).parent
    return f"bundled {path.name} of outrider {VERSION}" if path.resolve().parent == bundled.resolve() else path.resolve().name


_GENERIC = re.compile(r"Processor @|^unknown|^0*$|QEMU|Common|Virtual|^[0-9a-f/]+$", re.IGNORECASE)
"""Names that a virtual machine gives instead of its processor's."""
_ARM_PARTS = {
    "0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2", "0xd83": "Neoverse V3",
    "0xd8e": "Neoverse N3", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd41": "Cortex-A78", "0xd44": "Cortex-X1",
}  # fmt: skip
"""Part numbers of Arm's own cores (Arm's technical reference manuals, register MIDR_EL1)."""


def cpu_name() -> str:
    """Name of the processor. If the system gives a generic one, its family and model are added."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _brand() or platform.processor() or platform.machine()
    return cpu_name_of(lines)


def cpu_name_of(lines: Sequence[str]) -> str:
    """Name of the processor from the lines of ``/proc/cpuinfo``."""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    name = facts.get("model name") or _ARM_PARTS.get(facts.get("CPU part", ""), "")
    if not name and "CPU part" in facts:
        name = f"{platform.machine()}, implementer {facts.get('CPU implementer')}, part {facts['CPU part']}"
    if not name or _GENERIC.search(name):
        family = f"{facts.get('vendor_id')} family {facts.get('cpu family')} model {facts.get('model')}"
        name = f"{name or platform.machine()} ({family})"
    flags = facts.get("flags", "").split()
    return name + "".join(f", {flag}" for flag in ("avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if flag in flags)


def _brand() -> str | None:
    """The processor's name on a Mac."""
    try:
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _digest(path: Path) -> str:
    """Hash of the first and last megabyte and the size of every weight file, to tell checkpoints apart quickly."""
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
