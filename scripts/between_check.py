"""Run what is native between passes on an emulated processor: ``python scripts/between_check.py [--machine x86_64]``.

Choices of the sampler, trees of EAGLE and of heads without attention, and layers of experts and latents
(``between_check.cpp``), in float32 and bfloat16, greedy and sampled. The libraries of another machine run in an emulator
(``qemu-x86_64``, ``qemu-aarch64``) and are compared with this machine's: whole numbers are equal, logits nearly so.
``--folder`` keeps the libraries, whose compilation takes minutes; those that lie there are not compiled again.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import tempfile
from pathlib import Path

from wheels import FLAGS, NATIVE, SETS, compiler_for

from outrider.models.native.instruction_sets import isa_here

SOURCE = Path(__file__).with_suffix(".cpp")
WANTED = {"x86_64": ("avx2", "generic"), "aarch64": ("neon_dot", "neon", "generic")}
"""Sets that emulators have."""
MOST = {"float32": 1e-4, "bf16": 0.03}
"""The largest difference of logits, which are of size 1."""


def compiled(machine: str, name: str, folder: Path) -> Path:
    """The library of a set."""
    path = folder / f"{machine}-{name}.so"
    if not path.exists():
        print(f"compiling {path.name}", flush=True)
        command = [compiler_for(machine), *FLAGS, *SETS[machine][name], str(NATIVE / "decoder.cpp"), "-o", str(path)]
        subprocess.run(command, check=True)
    return path


def program(machine: str, folder: Path) -> list[str]:
    """A command that runs the check, in an emulator where the machine is another."""
    path = folder / f"{machine}-between_check"
    flags = ["-std=c++20", "-O1", "-Wno-psabi", f"-I{NATIVE}", "-pthread", "-o", str(path)]
    subprocess.run([compiler_for(machine), str(SOURCE), *flags, "-ldl"], check=True)
    if machine == platform.machine():
        return [str(path)]
    return [f"qemu-{machine}", "-cpu", "max", "-L", f"/usr/{machine}-linux-gnu", str(path)]


def said(command: list[str], library: Path) -> dict[str, list[float]]:
    """The numbers of each case."""
    run = subprocess.run([*command, str(library)], check=True, capture_output=True, text=True)
    found = dict[str, list[float]]()
    for line in run.stdout.splitlines():
        words = line.split()
        count = next(place for place, word in enumerate(words) if word.lstrip("-").replace(".", "").isdigit())
        found[" ".join(words[:count])] = [float(word) for word in words[count:]]
    return found


def differences(ours: dict[str, list[float]], others: dict[str, list[float]]) -> list[str]:
    """Cases that are not the same, in words."""
    assert list(ours) == list(others), "the same program ran"
    found: list[str] = []
    for name, mine in ours.items():
        most = max(abs(a - b) for a, b in zip(mine, others[name], strict=True))
        limit = MOST[name.split()[-1]] if name.startswith(("experts", "latents")) else 0.0
        if not most <= limit:
            found.append(f"{name}: {most:.2g} apart, at most {limit:.2g}")
    return found


def main() -> int:
    other = next(name for name in SETS if name != platform.machine())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default=other, choices=list(SETS), help="default: the one that this is not")
    parser.add_argument("--folder", type=Path, help="where libraries are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        here = platform.machine()
        ours = said(program(here, folder), compiled(here, isa_here({"OUTRIDER_ISA": "auto"}).name, folder))
        command, wrong = program(arguments.machine, folder), list[str]()
        for name in WANTED[arguments.machine]:
            found = differences(ours, said(command, compiled(arguments.machine, name, folder)))
            print(f"{arguments.machine} {name}: {len(ours)} cases, {len(found)} of them not the same", *found, sep="\n  ")
            wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
