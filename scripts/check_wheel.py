"""Install a wheel where there is no compiler and run the demo: ``python scripts/check_wheel.py dist/outrider-....whl``.

The wheel goes into a new virtual environment. Its programs then run with nothing but that environment on PATH and with an empty
cache folder, so the native pass can only be the wheel's. ``--packages DIR`` lends the environment the installed packages of
another one, so that nothing is downloaded. A wheel for the other machine is checked as far as that goes: an emulator
(``qemu-aarch64`` or ``qemu-x86_64``) loads its libraries and asks each for its name.
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


def check_emulated(wheel: Path, work: Path, machine: str) -> None:
    """Load the libraries of another machine's wheel in an emulator.

    An emulator may lack AMX. A library that asks the processor for permission may then be refused, as the program is.
    """
    emulator, compiler = f"qemu-{machine}", f"{machine}-linux-gnu-g++"
    for tool, package in ((emulator, "qemu-user"), (compiler, f"g++-{machine.replace('_', '-')}-linux-gnu")):
        if not shutil.which(tool):
            raise SystemExit(f"there is no {tool}; install {package}, or check this wheel on a machine of its kind")
    (work / "loader.cpp").write_text(_LOADER)
    subprocess.run([compiler, str(work / "loader.cpp"), "-o", str(work / "loader"), "-ldl"], check=True)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.extract(name, work) for name in archive.namelist() if name.endswith(".so")]
    assert libraries, f"{wheel.name} holds no library"
    for library in libraries:
        run = [emulator, "-cpu", "max", "-L", f"/usr/{machine}-linux-gnu", str(work / "loader"), library]
        done = subprocess.run(run, check=False, capture_output=True, text=True)
        said = done.stdout.strip()
        assert Path(library).stem == f"{machine}-{said}", f"{Path(library).name} says that it is {said!r} ({done.returncode})"
        refused = "" if done.returncode == 0 else "; it refuses this processor"
        print(f"{Path(library).name} loads and is {said}{refused}")


def machine_of(wheel: Path) -> str:
    """The machine in a wheel's tag: the end of ``manylinux_2_34_x86_64``."""
    return next(name for name in ("x86_64", "aarch64") if wheel.stem.endswith(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--packages", type=Path, metavar="DIR", help="site-packages of another environment to lend")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        if (machine := machine_of(arguments.wheel)) != platform.machine():
            check_emulated(arguments.wheel, Path(work), machine)
            print(f"the libraries of {arguments.wheel.name} load in an emulator")
        else:
            check_here(arguments.wheel, Path(work), arguments.packages)
            print(f"{arguments.wheel.name} works without a compiler")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
