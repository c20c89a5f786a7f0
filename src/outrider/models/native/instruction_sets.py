"""The instruction sets that the native pass supports (``isa/``), and the choice among them.

A machine runs the best set it has. ``OUTRIDER_ISA`` selects a lesser one for tests and comparisons. Two sets may give different
texts, since they fuse and round differently. Each set is bit-identical with itself.

``sets.cpp`` asks the processor what it has. It is compiled in an instant, and wheels contain it compiled.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from outrider.core.errors import OptionError, nearest
from outrider.models.native.compiler import FOLDER, compile_library, find_compiler, is_wanted, kept_path

PREBUILT = FOLDER / "prebuilt"
_SOURCE = FOLDER / "sets.cpp"
_VARIABLE = "OUTRIDER_ISA"


@dataclass(frozen=True)
class Isa:
    """One header of ``isa/`` and its compiler flags."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags for every processor that has the set."""
    auto_types: frozenset[torch.dtype]
    """Types that ``dtype="auto"`` keeps for a checkpoint stored in them. Others are widened to float32."""
    adds_halves: bool = False
    """Whether products of IEEE's 16 bits are summed in 16 bits (``half_sums.hpp``), so that F16 files are fastest as stored."""
    reads_halves: bool = False
    """Whether floats of 16 bits are widened as fast as they are read, so that F16 and BF16 files are fastest as stored. Sets
    with matrix tiles multiply bfloat16 directly, which is faster still. Products in pairs are not, where they were measured."""


_FLOAT = frozenset({torch.float32})
_SHORT = frozenset({torch.float32, torch.bfloat16})
_GENERIC = "-DOUTRIDER_ISA_GENERIC"
_TILES = ("-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
X86 = (
    Isa("amx", ("-march=x86-64-v4", *_TILES), _SHORT),
    Isa("avx512_bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _FLOAT, reads_halves=True),
    Isa("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _FLOAT, reads_halves=True),
    Isa("avx512", ("-march=x86-64-v4",), _FLOAT, reads_halves=True),
    Isa("avx2", ("-march=x86-64-v3",), _FLOAT, reads_halves=True),
    Isa("generic", ("-march=x86-64", _GENERIC), _FLOAT),
)
ARM = (
    Isa("neon_bf16", ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16",), _FLOAT, adds_halves=True),
    Isa("neon_i8mm", ("-march=armv8.2-a+fp16+dotprod+i8mm",), _FLOAT, adds_halves=True),
    Isa("neon_dot", ("-march=armv8.2-a+fp16+dotprod",), _FLOAT, adds_halves=True),
    Isa("neon", ("-march=armv8-a",), _FLOAT),
    Isa("generic", ("-march=armv8-a", _GENERIC), _FLOAT),
)
_OTHER = (Isa("generic", (_GENERIC,), _FLOAT),)


def isa_here(environment: Mapping[str, str] = os.environ) -> Isa:
    """The set that this machine runs: its best one, or the one that ``OUTRIDER_ISA`` names."""
    known = sets_here()
    wanted = environment.get(_VARIABLE, "auto")
    if wanted in ("", "auto"):
        return _tuned(known[0])
    found = next((isa for isa in known if isa.name == wanted), None)
    if found is None:
        names = [isa.name for isa in known]
        raise OptionError(
            f"{_VARIABLE} = {wanted!r} is no instruction set of this machine, which has {', '.join(names)}; "
            f"{nearest(wanted, ['auto', *names])}"
        )
    return found


def sets_here() -> tuple[Isa, ...]:
    """The sets that this machine has, best first; only the generic one where no native code can be had."""
    names = _names_here(is_wanted()) or ("generic",)
    return tuple(isa for isa in _sets_of(platform.machine().lower()) if isa.name in names)


def _sets_of(machine: str) -> tuple[Isa, ...]:
    return X86 if machine in ("x86_64", "amd64") else ARM if machine in ("aarch64", "arm64") else _OTHER


@cache
def _names_here(can_ask: bool) -> tuple[str, ...]:
    """Names that the processor reports; empty if it cannot be asked."""
    path = (_prebuilt_question() or _compiled_question()) if can_ask else None
    try:
        library = None if path is None else ctypes.CDLL(str(path))
    except OSError:
        library = None
    if library is None:
        return ()
    library.outrider_sets.restype = ctypes.c_char_p
    return tuple(library.outrider_sets().decode().split())


def question_name(machine: str) -> str:
    """File name of the library that reports the sets of a machine."""
    return f"{machine.lower()}-sets.so"


def _prebuilt_question() -> Path | None:
    path = PREBUILT / question_name(platform.machine())
    return path if platform.system() == "Linux" and path.is_file() else None


def _compiled_question() -> Path | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    path = kept_path(compiler, "sets", [_SOURCE], ())
    try:
        if not path.is_file():
            compile_library(compiler, _SOURCE, (), path)
    except (OSError, subprocess.SubprocessError):
        return None
    return path


def _tuned(isa: Isa) -> Isa:
    """The machine's best set, compiled with every other feature of this processor."""
    if isa in X86:
        return replace(isa, flags=("-march=native",))
    return replace(isa, flags=("-mcpu=native",)) if isa in ARM else isa


def has_bfloat16() -> bool:
    """Whether this is an x86 processor with bfloat16 products, which PyTorch needs to be fast in bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
