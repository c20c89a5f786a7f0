"""The files of another machine's Debian, with what our wheel needs and no compiler: ``python scripts/userland.py aarch64 DIR``.

``python scripts/check_wheel.py WHEEL --userland DIR`` then installs a wheel there and runs the whole demo in an emulator. This
needs root, ``debootstrap``, and ``qemu-user-static`` registered for the machine's programs (``update-binfmts --enable``).
The folder takes about 6 GB, because PyTorch's wheels for aarch64 bring the libraries of CUDA.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}
"""Debian's names of the machines."""
RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = Path("opt/packages")
"""Where the Python packages lie in the folder."""
_NEWEST_LIBC = 36  # bookworm's glibc is 2.36


def make(machine: str, folder: Path) -> None:
    """Debian with Python, and the Python packages that the wheel depends on."""
    for tool in ("debootstrap", f"qemu-{machine}-static"):
        if machine != platform.machine() and not shutil.which(tool):
            raise SystemExit(f"there is no {tool}; install debootstrap and qemu-user-static")
    wanted = ["python3", "python3-venv", "ca-certificates"]
    flags = [f"--arch={DEBIAN[machine]}", "--variant=minbase", f"--include={','.join(wanted)}"]
    subprocess.run(["debootstrap", *flags, RELEASE, str(folder)], check=True)
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    subprocess.run([*pip_install(machine, folder / PACKAGES), *needs], check=True)


def pip_install(machine: str, target: Path) -> list[str]:
    """The beginning of a command that installs wheels of another machine into a folder, without running them."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_LIBC, 16, -1)]
    platforms = [f"--platform={tag}" for tag in (*tags, f"manylinux2014_{machine}", f"linux_{machine}")]
    where = [f"--target={target}", f"--python-version={PYTHON}", "--only-binary=:all:", "--no-compile"]
    return [sys.executable, "-m", "pip", "install", *where, *platforms]


def run_inside(folder: Path, command: Sequence[str], **environment: str) -> None:
    """Run a command with the folder as its root, and nothing of this machine's environment."""
    given = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **environment}
    words = [f"{name}={value}" for name, value in given.items()]
    subprocess.run(["chroot", str(folder), "/usr/bin/env", "-i", *words, *command], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=list(DEBIAN))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make(arguments.machine, arguments.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
