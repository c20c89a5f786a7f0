"""Instruction sets of the native pass: each keeps its promises, and the wanted one is built and named."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import run_fresh
from tiers import repeats

from outrider.core.errors import OptionError
from outrider.models import dtypes, native
from outrider.models.native import build, instruction_sets
from outrider.models.native.compiler import find_compiler, kept_path
from outrider.models.native.instruction_sets import ARM, X86, isa_here, sets_here

NATIVE = Path(instruction_sets.__file__).parent
CHECK = Path(__file__).with_name("isa_check.cpp")
EMULATED = ("aarch64-linux-gnu-g++", "qemu-aarch64")
EMULATED_X86 = ("x86_64-linux-gnu-g++", "qemu-x86_64")


def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    """The check, with the flags of the library: the compiler joins products and sums as it does there. It is kept beside the
    library, until a source, the compiler or a flag changes."""
    path = kept_path(compiler, "isa_check", (CHECK, *sorted(NATIVE.rglob("*.hpp"))), (*build.FLAGS, *flags))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = path.with_suffix(f".{os.getpid()}")  # another process may be doing the same
        command = [compiler, "-std=c++20", *build.FLAGS, *flags, f"-I{NATIVE}", str(CHECK), "-o", str(mine)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        mine.replace(path)
    return path


def _compiler() -> str:
    found = find_compiler() if build.can_build() else None
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def own_sets() -> list[Any]:
    """The sets of this machine. ``make test`` builds the check of the best one, which is the one that runs."""
    best, *others = sets_here()
    return [pytest.param(best, id=best.name), *(pytest.param(isa, marks=pytest.mark.exhaustive, id=isa.name) for isa in others)]


@pytest.mark.parametrize("isa", own_sets())
def test_a_set_of_this_machine_keeps_its_promises(isa) -> None:
    """Lanes, products of any number of rows (a row's bits are its own) and attention, against plain loops."""
    result = subprocess.run([_compiled(_compiler(), isa.flags)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout == f"{isa.name} holds\n"


def emulated_sets() -> list[Any]:
    """The sets of aarch64. ``make test`` builds the check of the best one."""
    best, *others = ARM[:-1]
    return [pytest.param(best, id=best.name), *(pytest.param(isa, marks=pytest.mark.exhaustive, id=isa.name) for isa in others)]


@pytest.mark.parametrize("isa", emulated_sets())
def test_an_emulated_aarch64_keeps_its_promises(isa) -> None:
    """Every set of aarch64 that this machine does not have itself."""
    is_at_home = platform.machine() == "aarch64"
    compiler = _compiler() if is_at_home else EMULATED[0]
    if isa in sets_here() or not all(map(shutil.which, (compiler, EMULATED[1]))):
        pytest.skip("no aarch64 emulator, or none is needed")
    command = [EMULATED[1], "-cpu", "max", _compiled(compiler, ("-static", *isa.flags))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout == f"{isa.name} holds\n"


@pytest.mark.skipif(platform.machine() != "aarch64" or not all(map(shutil.which, EMULATED_X86)), reason="no x86 emulator")
def test_an_emulated_avx2_keeps_its_promises() -> None:
    command = [EMULATED_X86[1], "-cpu", "max", "-L", "/usr/x86_64-linux-gnu", _compiled(EMULATED_X86[0], X86[-2].flags)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout == "avx2 holds\n"


EMULATED_SETS = {
    "x86_64": {"qemu64": "generic", "Haswell": "avx2 generic"},
    "aarch64": {
        "cortex-a72": "neon generic",
        "neoverse-n1": "neon_dot neon generic",
        "max": "neon_bf16 neon_i8mm neon_dot neon generic",
    },
}


@pytest.mark.parametrize("machine", EMULATED_SETS)
def test_a_processor_says_which_sets_it_has(machine: str, tmp_path: Path) -> None:
    here = _compiler() if platform.machine() == machine else f"{machine}-linux-gnu-g++"
    if not all(map(shutil.which, (here, f"qemu-{machine}"))):
        pytest.skip(f"no {machine} emulator")
    (tmp_path / "say.cpp").write_text(SAY)
    command = [here, str(NATIVE / "sets.cpp"), str(tmp_path / "say.cpp"), "-o", str(tmp_path / "say")]
    subprocess.run(command, check=True, timeout=60)
    root = [] if platform.machine() == machine else ["-L", f"/usr/{machine}-linux-gnu"]
    for cpu, names in EMULATED_SETS[machine].items():
        run = [f"qemu-{machine}", *root, "-cpu", cpu, tmp_path / "say"]
        said = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said == names, cpu


SAY = """
#include <cstdio>
extern "C" const char* outrider_sets();
int main() { std::fputs(outrider_sets(), stdout); }
"""


def test_no_native_code_leaves_the_generic_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    assert [isa.name for isa in sets_here()] == ["generic"]


def test_the_best_set_is_taken_unless_another_is_wanted() -> None:
    assert isa_here({}).name == isa_here({"OUTRIDER_ISA": "auto"}).name == sets_here()[0].name
    if len(sets_here()) > 1:
        assert isa_here({"OUTRIDER_ISA": "generic"}) == sets_here()[-1]
    with pytest.raises(OptionError, match=r"OUTRIDER_ISA = 'genric' .* did you mean 'generic'"):
        isa_here({"OUTRIDER_ISA": "genric"})


PROGRAM = """
import ctypes, torch
from outrider import LLM, SamplingParams
from outrider.models.native import BUILD
from outrider.models.native.build import _path, _compiler
library = BUILD.wait()
library.outrider_isa.restype = ctypes.c_char_p
llm, params = LLM(dtype="bfloat16"), SamplingParams(max_tokens=24)
texts = [llm.generate("Once upon a time", params, method=llm.compose(name))[0].token_ids for name in ("plain", "best-first")]
print(library.outrider_isa().decode(), type(llm.target).__name__, texts[0] == texts[1], _path(_compiler()).name)
"""


def test_a_lesser_set_is_another_build_with_the_same_guarantee(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of speculation is that of plain decoding, bit for bit, on the set that is asked for.

    ``make test-all`` builds the generic set too, which takes a minute. ``make test`` asks where it would lie.
    """
    compiler, found = _compiler(), dict[str, str]()
    for wanted, name in (("auto", sets_here()[0].name), ("generic", "generic"))[: len(repeats(1, of=2))]:
        env = {**os.environ, "OUTRIDER_ISA": wanted, "OMP_NUM_THREADS": "1"}
        run = run_fresh(PROGRAM, env=env)
        assert run.returncode == 0, run.stderr
        isa, kind, is_same, path = run.stdout.split()
        assert (isa, kind, is_same) == (name, "NativeDecoder", "True")
        found[wanted] = path
    monkeypatch.setenv("OUTRIDER_ISA", "generic")
    lesser = build._path(compiler).name
    assert found.get("generic", lesser) == lesser and (lesser == found["auto"]) == (len(sets_here()) == 1)


@pytest.mark.parametrize("isa", [*X86, *ARM], ids=lambda isa: isa.name)
def test_auto_asks_the_instruction_set(isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "can_build", lambda: True)
    monkeypatch.setattr(native, "isa_here", lambda: isa)
    cpu = torch.device("cpu")
    assert dtypes.auto_dtype("float32", cpu) == dtypes.auto_dtype(None, cpu) == torch.float32
    assert (dtypes.auto_dtype("bfloat16", cpu) == torch.bfloat16) == (torch.bfloat16 in isa.auto_types)
