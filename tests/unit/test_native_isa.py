"""Instruction sets of the native pass: each keeps its promises, and the wanted one is built and named."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.core.errors import OptionError
from outrider.models import load, native
from outrider.models.native import build, instruction_sets
from outrider.models.native.instruction_sets import isa_here, sets_here

NATIVE = Path(instruction_sets.__file__).parent
CHECK = Path(__file__).with_name("isa_check.cpp")
EMULATED = ("aarch64-linux-gnu-g++", "qemu-aarch64")
EMULATED_X86 = ("x86_64-linux-gnu-g++", "qemu-x86_64")


def _compile(compiler: str, flags: tuple[str, ...], program: Path) -> None:
    """With the flags of the library: the compiler joins products and sums as it does there."""
    wanted = [flag for flag in build._FLAGS if flag not in ("-fPIC", "-shared")]
    command = [compiler, *wanted, *flags, f"-I{NATIVE}", str(CHECK), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)


def _compiler() -> str:
    found = build._find_compiler() if build.can_build() else None
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.mark.parametrize("isa", sets_here(), ids=lambda isa: isa.name)
def test_a_set_of_this_machine_keeps_its_promises(isa, tmp_path: Path) -> None:
    """Lanes, products of any number of rows (a row's bits are its own) and attention, against plain loops."""
    _compile(_compiler(), isa.flags, tmp_path / "check")
    result = subprocess.run([tmp_path / "check"], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout == f"{isa.name} holds\n"


@pytest.mark.skipif(platform.machine() != "x86_64" or not all(map(shutil.which, EMULATED)), reason="no aarch64 emulator")
@pytest.mark.parametrize("extra", ["", "+dotprod"])
def test_an_emulated_aarch64_keeps_its_promises(extra: str, tmp_path: Path) -> None:
    _compile(EMULATED[0], ("-static", f"-march=armv8.2-a{extra}"), tmp_path / "check")
    result = subprocess.run([EMULATED[1], tmp_path / "check"], capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout == "neon holds\n"


@pytest.mark.skipif(platform.machine() != "aarch64" or not all(map(shutil.which, EMULATED_X86)), reason="no x86 emulator")
def test_an_emulated_avx2_keeps_its_promises(tmp_path: Path) -> None:
    _compile(EMULATED_X86[0], ("-march=haswell",), tmp_path / "check")
    command = [EMULATED_X86[1], "-cpu", "max", "-L", "/usr/x86_64-linux-gnu", tmp_path / "check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout == "avx2 holds\n"


def test_the_best_set_is_taken_unless_another_is_wanted() -> None:
    assert isa_here({}).name == isa_here({"OUTRIDER_ISA": "auto"}).name == sets_here()[0].name
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


def test_a_lesser_set_is_another_build_with_the_same_guarantee() -> None:
    """The text of speculation is that of plain decoding, bit for bit, on the set that is asked for."""
    _compiler()
    found = {}
    for wanted, name in (("auto", sets_here()[0].name), ("generic", "generic")):
        env = {**os.environ, "OUTRIDER_ISA": wanted, "OMP_NUM_THREADS": "1"}
        run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300, check=True)
        isa, kind, is_same, path = run.stdout.split()
        assert (isa, kind, is_same) == (name, "NativeDecoder", "True")
        found[wanted] = path
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("isa", [*instruction_sets._X86, *instruction_sets._ARM], ids=lambda isa: isa.name)
def test_auto_asks_the_instruction_set(isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "can_build", lambda: True)
    monkeypatch.setattr(native, "isa_here", lambda: isa)
    cpu = torch.device("cpu")
    assert load.auto_dtype("float32", cpu) == load.auto_dtype(None, cpu) == torch.float32
    assert (load.auto_dtype("bfloat16", cpu) == torch.bfloat16) == (torch.bfloat16 in isa.auto_types)
