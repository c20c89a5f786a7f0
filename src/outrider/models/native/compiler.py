"""The C++ compiler of this machine, and the cache of compiled libraries.

Libraries are kept in the user's cache folder (``OUTRIDER_CACHE`` moves it), named after the sources, the flags, the compiler
and the processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_LIBRARY = ("-std=c++20", "-fPIC", "-shared")
_SECONDS = 3600
"""Limit of one compilation, in seconds of the wall's time. It takes about two minutes of a processor, and several times as long
where other work shares the machine."""


def is_wanted() -> bool:
    """Whether native code is used at all; not with ``OUTRIDER_NATIVE=0``."""
    return os.environ.get("OUTRIDER_NATIVE", "1") != "0"


def find_compiler() -> str | None:
    """The C++ compiler that ``CXX`` names, or a usual one."""
    wanted = os.environ.get("CXX")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


def kept_path(compiler: str, name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Path of the library of these sources for this compiler and this processor."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    digest.update(" ".join((*_LIBRARY, *flags, _version(compiler), processor())).encode())
    return cache_folder() / f"{name}-{digest.hexdigest()[:20]}.so"


def compile_library(compiler: str, source: Path, flags: Sequence[str], path: Path) -> None:
    """Compile under a temporary name first, because another process may be doing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *_LIBRARY, *flags, str(source), "-o", partial]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def cache_folder() -> Path:
    """Folder of everything that was built or measured on this machine (``OUTRIDER_CACHE``, or the user's cache folder)."""
    folder = os.environ.get("OUTRIDER_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "outrider")
    return Path(folder).expanduser()


@cache
def _version(compiler: str) -> str:
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    return result.stdout.partition("\n")[0]


@cache
def processor() -> str:
    """Text that identifies this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
