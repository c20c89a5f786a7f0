"""Install a wheel where there is no compiler and run the demo: ``python scripts/check_wheel.py dist/outrider-....whl``.

The wheel goes into a new virtual environment. Its programs then run with nothing but that environment on PATH and with an empty
cache folder, so the native pass can only be the wheel's. ``--packages DIR`` lends the environment the installed packages of
another one, so that nothing is downloaded.

Where there is an emulator (``qemu-x86_64``, ``qemu-aarch64``), processors of several kinds are asked which library they choose,
and what a small model says on each set that they have (``pass_check.cpp``). ``--own LIBRARY`` adds a library that was compiled
on such a machine: a set with the same name finds the same bits.

``--userland DIR`` names the root folder of another machine's Debian, which ``scripts/userland.py`` makes. The wheel is
installed there by pip, and the whole demo runs in the emulator, where there is no compiler either. ``QEMU_CPU`` names the
processor: PyTorch's import ended with a segmentation fault on the one that QEMU 7.2 takes by itself (``max``).
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

from userland import PACKAGES, run_inside

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src" / "outrider" / "models" / "native"
_NATIVE = """
from outrider.models.native import BUILD
from outrider.models.native.compiler import find_compiler
assert find_compiler() is None, "there is a compiler on PATH"
assert BUILD.wait() is not None, "the native pass is not there"
"""
PROCESSORS = {"x86_64": ("qemu64", "Haswell", "max"), "aarch64": ("cortex-a72", "neoverse-n1", "max")}
"""Those that an emulator (``qemu-x86_64``, ``qemu-aarch64``) is asked for."""


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


def check_emulated(wheel: Path, work: Path, machine: str, own: list[Path]) -> None:
    """Run the libraries of a wheel on emulated processors. Each says which it chooses; equal sets find equal bits."""
    compiler = "g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"
    for tool, package in ((f"qemu-{machine}", "qemu-user"), (compiler, f"g++-{machine.replace('_', '-')}-linux-gnu")):
        if not shutil.which(tool):
            raise SystemExit(f"there is no {tool}; install {package}, or check this wheel on a machine of its kind")
    program = work / "pass_check"
    flags = ["-std=c++20", "-O1", "-Wno-psabi", f"-I{NATIVE}", "-pthread", "-o", str(program)]
    subprocess.run([compiler, str(ROOT / "scripts" / "pass_check.cpp"), *flags, "-ldl"], check=True)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [Path(archive.extract(name, work)) for name in archive.namelist() if name.endswith(".so")]
    assert libraries, f"{wheel.name} holds no library"
    root = [] if machine == platform.machine() else ["-L", f"/usr/{machine}-linux-gnu"]
    digests = dict[str, str]()
    for processor in PROCESSORS[machine]:
        run = [f"qemu-{machine}", *root, "-cpu", processor, str(program), str(libraries[0].parent), machine]
        said = subprocess.run([*run, *map(str, own)], check=True, capture_output=True, text=True).stdout
        found = [line.split() for line in said.splitlines()]
        print(f"{processor}: takes {found[0][0]}; {', '.join(f'{name} {digest}' for name, digest, _ in found)}")
        for name, digest, _ in found:
            assert digests.setdefault(name, digest) == digest, f"{name} finds other bits on {processor}"


def check_userland(wheel: Path, folder: Path) -> None:
    """Install the wheel in another machine's userland, where pip reads its tag, and run the demo there without a compiler."""
    place, inside = folder / "root" / wheel.name, f"/root/{wheel.name}"
    shutil.copy(wheel, place)
    run_inside(folder, ["rm", "-rf", "/root/venv", "/root/cache"])
    run_inside(folder, ["python3", "-m", "venv", "/root/venv"])
    run_inside(folder, ["/root/venv/bin/pip", "install", "--quiet", "--no-deps", "--no-compile", inside])
    site = next((folder / "root" / "venv" / "lib").glob("python*/site-packages"))
    (site / "lent.pth").write_text(f"/{PACKAGES}\n")
    environment = {"PATH": "/root/venv/bin:/usr/bin:/bin", "OUTRIDER_CACHE": "/root/cache", "PYTHONDONTWRITEBYTECODE": "1"}
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "QEMU_CPU") if name in os.environ}
    for command in (["python", "-c", _NATIVE], ["outrider", "--version"], ["outrider", "demo"]):
        run_inside(folder, command, **environment, **threads)


def machine_of(wheel: Path) -> str:
    """The machine in a wheel's tag: the end of ``manylinux_2_34_x86_64``."""
    return next(name for name in ("x86_64", "aarch64") if wheel.stem.endswith(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--packages", type=Path, metavar="DIR", help="site-packages of another environment to lend")
    parser.add_argument("--own", type=Path, nargs="*", default=[], metavar="LIBRARY", help="made on a machine, to compare with")
    parser.add_argument("--userland", type=Path, metavar="DIR", help="another machine's root folder, of scripts/userland.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        is_home = (machine := machine_of(arguments.wheel)) == platform.machine()
        if is_home:
            check_here(arguments.wheel, Path(work), arguments.packages)
            print(f"{arguments.wheel.name} works without a compiler")
        if not is_home or shutil.which(f"qemu-{machine}"):
            check_emulated(arguments.wheel, Path(work), machine, arguments.own)
            print(f"the libraries of {arguments.wheel.name} run in an emulator")
    if arguments.userland:
        check_userland(arguments.wheel, arguments.userland)
        print(f"the demo of {arguments.wheel.name} runs in an emulated {machine} without a compiler")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
