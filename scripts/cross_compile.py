"""Compile the native pass for other systems: ``python scripts/cross_compile.py [macos windows] [--link] [--out DIR]``.

``decoder.cpp`` and ``sets.cpp`` are compiled for Apple silicon and for Windows on x86-64, each with the flags of a set
that such machines have. The compiler is Clang out of the package ``ziglang``, which brings headers and C++ libraries of both
systems along. So what does not compile is found without such a machine. Nothing is run. ``--link`` makes libraries, which finds
missing names too; the first time it also compiles the C++ library, which takes minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src" / "outrider" / "models" / "native"
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=fast", "-pthread", "-Wno-psabi")
SOURCES = ("sets.cpp", "decoder.cpp")


@dataclass(frozen=True)
class System:
    """A system, and how its compiler is asked for a set of its machines."""

    target: str
    flags: tuple[str, ...]
    suffix: str


SYSTEMS = {
    "macos": System("aarch64-macos", ("-mcpu=apple_m1",), ".dylib"),  # neon_dot
    "windows": System("x86_64-windows-gnu", ("-mcpu=x86_64_v3",), ".dll"),  # avx2
}


def has_compiler() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def compile_for(name: str, source: str, folder: Path, *, link: bool = False) -> Path:
    """One source for one system: an object, or a library."""
    system = SYSTEMS[name]
    out = folder / f"{name}-{Path(source).stem}{system.suffix if link else '.o'}"
    command = [sys.executable, "-m", "ziglang", "c++", "-target", system.target, *FLAGS, *system.flags]
    result = subprocess.run(
        [*command, "-shared" if link else "-c", str(NATIVE / source), "-o", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{source} does not compile for {name}:\n{result.stderr}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", nargs="*", default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--link", action="store_true")
    parser.add_argument("--out", type=Path, help="where the results stay; a temporary folder otherwise")
    args = parser.parse_args()
    if not has_compiler():
        raise SystemExit("there is no compiler for other systems; pip install ziglang")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.system:
            for source in SOURCES:
                out = compile_for(name, source, folder, link=args.link)
                print(f"{out.name}: {out.stat().st_size / 1e3:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
