"""Install a wheel where there is no compiler and run the demo: ``python scripts/check_wheel.py dist/outrider-....whl``.

The wheel goes into a new virtual environment. Its programs then run with nothing but that environment on PATH and with an empty
cache folder, so the native pass can only be the wheel's. ``--packages DIR`` lends the environment the installed packages of
another one, so that nothing is downloaded. A wheel for aarch64 is checked on x86-64 as far as that goes: an emulator
(``qemu-aarch64``) loads its libraries and asks each for its name.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_NATIVE = """
from outrider.models.native import BUILD
from outrider.models.native.build import _find_compiler
assert _find_compiler() is None, "there is a compiler on PATH"
assert BUILD.wait() is not None, "the native pass is not there"
"""
_LOADER = """
#include <dlfcn.h>
#include <cstdio>
int main(int, char** given) {
    void* library = dlopen(given[1], RTLD_NOW);
    if (!library) { std::puts(dlerror()); return 1; }
    auto name = (const char* (*)())dlsym(library, "outrider_isa");
    auto init = (int (*)())dlsym(library, "outrider_init");
    std::puts(name());
    return init() ? 0 : 2;
}
"""


def check_here(wheel: Path, work: Path, packages: Path | None) -> None:
    """Install the wheel and run the demo without a compiler."""
    bin_folder = work / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", str(work / "venv")], check=True)
    install = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run([*install, "--no-deps"] if packages else install, check=True)
    if packages:
        site = next((work / "venv" / "lib").glob("python*/site-packages"))
        (site / "lent.pth").write_text(f"{packages.resolve()}\n")
    environment = {"PATH": str(bin_folder), "OUTRIDER_CACHE": str(work / "cache"), "HOME": str(work), "LANG": "C.UTF-8"}
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    for command in (["python", "-W", "error::UserWarning", "-c", _NATIVE], ["outrider", "demo", "--max-tokens", "40"]):
        subprocess.run([str(bin_folder / command[0]), *command[1:]], env={**environment, **threads}, cwd=work, check=True)


def check_emulated(wheel: Path, work: Path) -> None:
    """Load the libraries of an aarch64 wheel in an emulator."""
    (work / "loader.cpp").write_text(_LOADER)
    command = ["aarch64-linux-gnu-g++", str(work / "loader.cpp"), "-o", str(work / "loader"), "-ldl"]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.extract(name, work) for name in archive.namelist() if name.endswith(".so")]
    assert libraries, f"{wheel.name} holds no library"
    for library in libraries:
        run = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", str(work / "loader"), library]
        said = subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()
        assert Path(library).stem == f"aarch64-{said}", f"{Path(library).name} says that it is {said}"
        print(f"{Path(library).name} loads and is {said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--packages", type=Path, metavar="DIR", help="site-packages of another environment to lend")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        if "aarch64" in arguments.wheel.name and platform.machine() != "aarch64":
            if not shutil.which("qemu-aarch64"):
                raise SystemExit("there is no qemu-aarch64; install qemu-user, or check this wheel on an aarch64 machine")
            check_emulated(arguments.wheel, Path(work))
        else:
            check_here(arguments.wheel, Path(work), arguments.packages)
    print(f"{arguments.wheel.name} works without a compiler")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
