"""Compiled libraries inside a wheel, for machines without a compiler.

``scripts/wheels.py`` compiles one library per instruction set into the folder ``prebuilt/``, which a checkout does not have. It
compiles ``sets.cpp`` there too, which says what the processor has. A library is named after the machine and the set:
``x86_64-avx2.so``. A machine uses the best one that it can run. A compiler on the machine is still preferred, because it tunes
for the exact processor.
"""

from __future__ import annotations

import platform
from pathlib import Path

from outrider.models.native.instruction_sets import PREBUILT, isa_here, sets_here


def prebuilt_library(folder: Path = PREBUILT) -> Path | None:
    """The best library in the folder that this machine can run; None if there is none."""
    if platform.system() != "Linux":
        return None
    names = [isa.name for isa in sets_here()]
    lesser = names[names.index(isa_here().name) :]
    paths = (folder / file_name(platform.machine(), name) for name in lesser)
    return next((path for path in paths if path.is_file()), None)


def file_name(machine: str, isa: str) -> str:
    """File name of the library for a machine and an instruction set."""
    return f"{machine.lower()}-{isa}.so"
