"""Compiles the native pass once per machine and keeps it.

The sources are small and need no headers but the compiler's, so this takes a few seconds, and only the first time: the result
is named after the sources, the compiler, the processor and the instruction set (``OUTRIDER_ISA``), and lies in the user's cache
folder (``OUTRIDER_CACHE`` moves it).
Where there is no compiler, the library that a wheel brings along is used (``prebuilt.py``). Where there is neither, or with
``OUTRIDER_NATIVE=0``, everything runs in PyTorch instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from functools import cache
from pathlib import Path

import torch

from outrider.models.native.instruction_sets import isa_here
from outrider.models.native.prebuilt import prebuilt_library

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "decoder.cpp"
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
_SECONDS = 900


class Build:
    """The library, as soon as there is one. ``library`` never waits; ``wait`` does."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._is_done = False

    def start(self) -> None:
        """Open the library if it was built before; begin to build it in the background otherwise."""
        with self._lock:
            if self._is_done or self._thread is not None:
                return
            compiler = _compiler()
            if compiler is None:
                self._library, self._is_done = _open_prebuilt(), True
                return
            path = _path(compiler)
            if path.is_file():
                self._library, self._is_done = _open(path), True
                return
            self._thread = threading.Thread(target=self._build, args=(compiler, path), daemon=True)
            self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and not self._is_done

    @property
    def library(self) -> ctypes.CDLL | None:
        return self._library

    def wait(self) -> ctypes.CDLL | None:
        self.start()
        thread = self._thread
        if thread is not None:
            thread.join()
        return self._library

    def _build(self, compiler: str, path: Path) -> None:
        try:
            _compile(compiler, path)
            self._library = _open(path)
        except (OSError, subprocess.SubprocessError) as error:
            warnings.warn(f"the native CPU pass could not be built ({_reason(error)}); running in PyTorch", stacklevel=2)
        self._is_done = True


BUILD = Build()


def built_library() -> ctypes.CDLL | None:
    """The library; None where it cannot be had. Waits for the first build on a machine, and says so: a process that began in
    PyTorch and went native later would write other texts from the same seed."""
    BUILD.start()
    if BUILD.is_running:
        began = time.perf_counter()
        print("building the native CPU pass, once on this machine (10 to 60 seconds) ...", file=sys.stderr, flush=True)
        if BUILD.wait() is not None:
            print(f"built in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return BUILD.library


def ready_to_measure() -> None:
    """Wait for the first build before anything is measured; a GPU has none."""
    if not torch.cuda.is_available():
        built_library()


def can_build() -> bool:
    """The native pass is wanted and can be had: from a compiler, or from the wheel."""
    return _is_wanted() and (_find_compiler() is not None or prebuilt_library() is not None)


def _is_wanted() -> bool:
    return os.environ.get("OUTRIDER_NATIVE", "1") != "0"


def _find_compiler() -> str | None:
    wanted = os.environ.get("CXX")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


def _compiler() -> str | None:
    """A C++ compiler, unless the user wants none."""
    if not _is_wanted():
        return None
    found = _find_compiler()
    if found is None and prebuilt_library() is None:
        warnings.warn(
            "no C++ compiler was found, so the CPU runs in PyTorch, which is slower for small models; install g++ "
            "(or set OUTRIDER_NATIVE=0 to silence this)",
            stacklevel=3,
        )
    return found


def _path(compiler: str) -> Path:
    """Where the library for these sources, this compiler and this processor lies."""
    digest = hashlib.sha256()
    for path in (_SOURCE, *sorted(_FOLDER.rglob("*.hpp"))):
        digest.update(path.read_bytes())
    digest.update(" ".join((*_FLAGS, *isa_here().flags, _version(compiler), processor())).encode())
    return cache_folder() / f"native-{digest.hexdigest()[:20]}.so"


def cache_folder() -> Path:
    """Where what was built or measured on this machine is kept (``OUTRIDER_CACHE``, or the user's cache folder)."""
    folder = os.environ.get("OUTRIDER_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "outrider")
    return Path(folder).expanduser()


@cache
def _version(compiler: str) -> str:
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    return result.stdout.partition("\n")[0]


@cache
def processor() -> str:
    """What tells this machine's processor from others."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, path: Path) -> None:
    """Into a temporary name first: another process may be doing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, *isa_here().flags, str(_SOURCE), "-o", partial]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _open(path: Path) -> ctypes.CDLL | None:
    library = ctypes.CDLL(str(path))
    return library if library.outrider_init() else None


def _open_prebuilt() -> ctypes.CDLL | None:
    """The library that the wheel brought, where it is wanted and this system can load it."""
    path = prebuilt_library() if _is_wanted() else None
    try:
        return None if path is None else _open(path)
    except OSError as error:
        warnings.warn(f"the native CPU pass of the wheel could not be loaded ({error}); running in PyTorch", stacklevel=3)
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in str(error.stderr).splitlines() if "error" in line]
        return lines[0] if lines else f"the compiler exited with {error.returncode}"
    return str(error)
