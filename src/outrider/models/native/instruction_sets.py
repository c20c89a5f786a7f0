"""The instruction sets the native pass knows (``isa/``), and which of them this machine gets.

A machine gets the best set it has. ``OUTRIDER_ISA`` asks for a lesser one, to test it or to compare: the text of one set need
not be that of another to the last bit, since they fuse and round differently, but each is bit-identical with itself.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from outrider.core.errors import OptionError, nearest

_VARIABLE = "OUTRIDER_ISA"


@dataclass(frozen=True)
class Isa:
    """One header of ``isa/`` and how it is compiled."""

    name: str
    flags: tuple[str, ...]
    """Of the compiler, on a machine that has more than this set."""
    auto_types: frozenset[torch.dtype]
    """Types that ``dtype="auto"`` takes for a checkpoint stored in them; others are widened to float32."""


_FLOAT = frozenset({torch.float32})
_SHORT = frozenset({torch.float32, torch.bfloat16})
_GENERIC = "-DOUTRIDER_ISA_GENERIC"
_X86 = (
    Isa("amx", ("-march=native",), _SHORT),
    Isa("avx512", ("-march=skylake-avx512",), _FLOAT),
    Isa("avx2", ("-march=haswell",), _FLOAT),
    Isa("generic", ("-march=x86-64", _GENERIC), _FLOAT),
)
_ARM = (
    Isa("neon", ("-mcpu=native",), _FLOAT),
    Isa("generic", ("-mcpu=native", _GENERIC), _FLOAT),
)
_OTHER = (Isa("generic", (_GENERIC,), _FLOAT),)


def isa_here(environment: Mapping[str, str] = os.environ) -> Isa:
    """The set this machine runs: the best it has, or the lesser one that ``OUTRIDER_ISA`` names."""
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
    """The sets this machine has, the best first."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return _ARM
    if machine not in ("x86_64", "amd64"):
        return _OTHER
    if torch.cpu._is_amx_tile_supported():
        return _X86
    if torch.cpu._is_avx512_supported():
        return _X86[1:]
    return _X86[2:] if torch.cpu._is_avx2_supported() else _X86[3:]


def _tuned(isa: Isa) -> Isa:
    """The machine's best set, with whatever else this very processor has."""
    if isa not in _X86:
        return isa
    return replace(isa, flags=("-march=native",), auto_types=_SHORT if has_bfloat16() else isa.auto_types)


def has_bfloat16() -> bool:
    """An x86 processor that multiplies bfloat16 itself, which PyTorch needs to be fast in it."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
