"""Build wheels with the native pass inside: ``python scripts/wheels.py [--machine x86_64 aarch64] [--out dist]``.

A wheel of a machine holds one library per instruction set, so it needs no compiler where it is installed. The best one
that the processor has is chosen when it is loaded. The other machine's libraries come from a cross-compiler,
``aarch64-linux-gnu-g++`` or ``x86_64-linux-gnu-g++``. The wheel's tag names the oldest C library that its libraries run on,
which is read out of them. Other machines install the source distribution and compile.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src" / "outrider" / "models" / "native"
FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-O3",
    "-ffp-contract=fast",
    "--param=avoid-fma-max-bits=0",
    "-pthread",
    "-Wno-psabi",
    "-static-libstdc++",
    "-static-libgcc",
)
GENERIC = "-DOUTRIDER_ISA_GENERIC"
SETS = {
    "x86_64": {
        "amx": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        "avx512_bf16": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni"),
        "avx512": ("-march=x86-64-v4",),
        "avx2": ("-march=x86-64-v3",),
        "generic": ("-march=x86-64", GENERIC),
    },
    "aarch64": {
        "neon_bf16": ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",),
        "neon_i8mm": ("-march=armv8.2-a+fp16+dotprod+i8mm",),
        "neon_dot": ("-march=armv8.2-a+fp16+dotprod",),
        "neon": ("-march=armv8-a",),
        "generic": ("-march=armv8-a", GENERIC),
    },
}
"""Flags of each set that hold for every processor that has it: those of ``models/native/instruction_sets.py``."""


def compiler_for(machine: str) -> str:
    """A compiler that makes libraries for ``machine``."""
    names = ["g++", "c++"] if machine == platform.machine() else [f"{machine}-linux-gnu-g++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise SystemExit(f"there is no compiler for {machine}; install {names[0]} (Debian: g++-{machine}-linux-gnu)")
    return found


def compile_sets(machine: str, folder: Path) -> list[Path]:
    """The libraries of every set of a machine in ``folder``, and the one that says which of them a processor has. They are
    compiled beside each other."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = compiler_for(machine)
    wanted = {name: ("decoder.cpp", flags) for name, flags in SETS[machine].items()} | {"sets": ("sets.cpp", ())}

    def compile_set(name: str) -> Path:
        source, flags = wanted[name]
        out = folder / f"{machine}-{name}.so"
        print(f"compiling {out.name}", flush=True)
        subprocess.run([compiler, *FLAGS, *flags, str(NATIVE / source), "-o", str(out)], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_set, wanted))


def oldest_libc(libraries: list[Path]) -> tuple[int, int]:
    """The version of glibc that the libraries need, as their symbols say."""
    text = b"".join(path.read_bytes() for path in libraries)
    found = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", text)}
    return max(found)


def lend_repository(copy: Path) -> None:
    """Let the copy of the tree use this repository, because the version comes from its tags. Sources without one have none."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--absolute-git-dir"]
    try:
        folder = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return
    (copy / ".git").write_text(f"gitdir: {folder}\n")


def build_wheel(machine: str, out: Path) -> Path:
    """A wheel for one machine. It is built from a copy of the tree, so that no other machine's libraries get into it."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "outrider"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "prebuilt", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        lend_repository(copy)
        made = compile_sets(machine, copy / "src" / "outrider" / "models" / "native" / "prebuilt")
        major, minor = oldest_libc(made)
        tag = f"--build-option=--plat-name=manylinux_{major}_{minor}_{machine}"
        command = [sys.executable, "-m", "pip", "wheel", str(copy), "--no-deps", "--wheel-dir", str(out)]
        subprocess.run([*command, f"--config-settings={tag}"], check=True)
    return max(out.glob(f"*{machine}.whl"), key=lambda path: path.stat().st_mtime)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", nargs="+", default=[platform.machine()], choices=list(SETS), help="default: this one")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    arguments = parser.parse_args()
    for machine in arguments.machine:
        wheel = build_wheel(machine, arguments.out)
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
